"""Divergences against their definitions: decomposition, closed-form gradients, hand values, limits, invariances, precision."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from posttrain.distill.divergences import LARGEST_BETA, loss
from posttrain.distill.formulas import Divergence

V = 12
KINDS = ("kl", "rkl", "jsd", "skew_kl", "topk_only", "tail_only", "dkd", "tad")


def drawn(*shape: int, seed: int = 0, dtype=torch.float64, size: float = 2.0) -> torch.Tensor:
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def example(rows: int = 2, width: int = 5, v: int = V, dtype=torch.float64):
    """(teacher, student that needs a gradient, ragged mask, labels)."""
    t, s = drawn(rows, width, v, seed=1).to(dtype), drawn(rows, width, v, seed=2).to(dtype).requires_grad_()
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[1:2, 3:] = False
    return t, s, mask, torch.randint(v, (rows, width), generator=torch.Generator().manual_seed(3))


def evaluate(t, s, mask, divergence: Divergence, upstream=None, **options):
    """(loss [B, T], gradient of its weighted sum, statistics)."""
    s = s.detach().clone().requires_grad_()
    value, found = loss(t, s, mask, divergence, **options)
    (value if upstream is None else value * upstream).sum().backward()
    return value.detach(), s.grad, found


def parts(t: torch.Tensor, s: torch.Tensor, k: int, index: torch.Tensor | None = None):
    """(KL, KL1, KL2, alpha^T, alpha^S) of one position, from probabilities and the definitions, differentiable in s."""
    pt, ps = t.softmax(-1), s.softmax(-1)
    head = torch.zeros(t.shape[-1], dtype=torch.bool)
    head[t.topk(k).indices if index is None else index] = True
    at, as_ = pt[~head].sum(), ps[~head].sum()
    kl = (pt * (pt / ps).log()).sum()
    kl1 = (pt[head] * (pt[head] / ps[head]).log()).sum() + at * (at / as_).log()
    qt, qs = pt[~head] / at, ps[~head] / as_
    return kl, kl1, (qt * (qt / qs).log()).sum(), at, as_


def naive(divergence: Divergence, t, s, mask, labels) -> torch.Tensor:
    """[B, T] from the definitions, position by position."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for b in range(len(mask)):
        at = [i for i in range(mask.shape[1]) if mask[b, i]]
        mean = sum(parts(t[b, i], s[b, i], divergence.k)[3] for i in at) / len(at)
        for i in at:
            pt, ps = (t[b, i] / divergence.temperature).softmax(-1), (s[b, i] / divergence.temperature).softmax(-1)
            w = divergence.mixture
            m = w * pt + (1 - w) * ps
            if divergence.kind == "kl":
                value = (pt * (pt / ps).log()).sum()
            elif divergence.kind == "rkl":
                value = (ps * (ps / pt).log()).sum()
            elif divergence.kind == "jsd":
                value = w * (pt * (pt / m).log()).sum() + (1 - w) * (ps * (ps / m).log()).sum()
            elif divergence.kind == "skew_kl":
                value = (pt * (pt / m).log()).sum()
            elif divergence.kind == "topk_only":
                top = pt.topk(divergence.k).indices
                qt, qs = pt[top] / pt[top].sum(), ps[top] / ps[top].sum()
                value = (qt * (qt / qs).log()).sum()
            elif divergence.kind == "tail_only":
                value = parts(t[b, i], s[b, i], divergence.k)[2]
            elif divergence.kind == "dkd":
                which = labels[b, i] if divergence.target == "label" else t[b, i].argmax()
                _, kl1, kl2, _, _ = parts(t[b, i], s[b, i], 1, which[None])
                value = divergence.alpha * kl1 + divergence.beta * kl2
            else:
                _, kl1, kl2, alpha, _ = parts(t[b, i], s[b, i], divergence.k)
                x = divergence.beta / mean if divergence.normalise == "sequence" else divergence.beta
                value = kl1 + x * alpha * kl2
            out[b, i] = value
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_definition(kind):
    t, s, mask, labels = example()
    for options in (
        {},
        {"normalise": "constant", "beta": 3.0},
        {"mixture": 0.1, "alpha": 0.7, "beta": 0.3, "k": 1},
        {"target": "teacher_argmax"},
        *([{"temperature": 1.7}] if kind in ("kl", "rkl", "jsd", "skew_kl", "topk_only") else []),
    ):
        one = Divergence(kind=kind, **({"k": 3} | options))
        wanted = naive(one, t, s, mask, labels)
        (gradient,) = torch.autograd.grad(wanted.sum(), s)
        value, found, _ = evaluate(t, s, mask, one, labels=labels)
        assert torch.allclose(value, wanted.detach(), atol=1e-12) and torch.allclose(found, gradient, atol=1e-12), options
        assert gradient.norm() > 1e-3 or (kind == "topk_only" and one.k == 1)  # one token, renormalised, is always certain


def test_kl_is_kl1_and_alpha_times_kl2():
    """Oracle 1, for any K, to 1e-12; and statistics are those of the definition."""
    t, s, mask, _ = example(3, 4, 40)
    mask[:] = True
    kl, _, _ = evaluate(t, s, mask, Divergence(kind="kl"))
    for k in (1, 2, 7, 20, 38):
        _, _, found = evaluate(t, s, mask, Divergence(k=k), stats=True)
        assert (found["kl1"] + found["alpha_t"] * found["kl2"] - kl.flatten()).abs().max() < 1e-12
        alone = parts(t[1, 2], s[1, 2].detach(), k)
        for name, value in zip(("kl1", "kl2", "alpha_t", "alpha_s"), alone[1:], strict=True):
            assert found[name][1 * 4 + 2] == pytest.approx(float(value), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_beta_of_mean_alpha_is_kl(dtype):
    """Oracle 2: value and gradient; beta = 1 is something else."""
    t, s, mask, _ = example(1, 6, 40, dtype)
    mask[:] = True
    _, _, found = evaluate(t, s, mask, Divergence(k=5), stats=True)
    kl, gradient, _ = evaluate(t, s, mask, Divergence(kind="kl"))
    value, same, _ = evaluate(t, s, mask, Divergence(k=5, beta=float(found["alpha_t"].mean())))
    near = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    assert ((value - kl).abs() / kl).max() < near
    # a bfloat16 gradient has 8 digits: the two may be rounded to neighbours
    assert (same - gradient).abs().max() < (2**-8 * gradient.abs().max() if dtype == torch.bfloat16 else near)
    value, other, _ = evaluate(t, s, mask, Divergence(k=5, beta=1.0))
    assert (value - kl).abs().max() > 0.1 and (other - gradient).abs().max() > 0.1


def test_gradient_has_the_form_of_the_card():
    """Oracle 3: item 4's closed form; the extra term sums to 0 over the tail; the head's gradient does not know beta."""
    t, s, mask, _ = example(1, 4, 20)
    k, beta = 4, 3.0
    _, gradient, found = evaluate(t, s, mask, Divergence(k=k, beta=beta), stats=True)
    _, other, _ = evaluate(t, s, mask, Divergence(k=k, beta=0.5))
    assert found["beta_x"][0] == pytest.approx(beta / float(found["alpha_t"].mean()), abs=1e-12)
    for i in range(4):
        pt, ps = t[0, i].softmax(-1), s[0, i].detach().softmax(-1)
        _, _, _, at, as_ = parts(t[0, i], s[0, i].detach(), k)
        head = t[0, i].topk(k).indices
        extra = (found["beta_x"][0] - 1) * (ps * at / as_ - pt)
        extra[head] = 0
        assert torch.allclose(gradient[0, i], ps - pt + extra, atol=1e-13)
        assert extra.abs().max() > 1e-3 and abs(extra.sum()) < 1e-13
        assert torch.equal(gradient[0, i, head], other[0, i, head])
        assert found["tail_share"][i] == pytest.approx(
            float(1 - gradient[0, i, head].square().sum() / gradient[0, i].square().sum()), abs=1e-9
        )
        assert found["grad_norm"][i] == pytest.approx(float(gradient[0, i].norm()), abs=1e-12)


def test_hand_case():
    """Oracle 4."""
    t = torch.tensor([[[0.8, 0.15, 0.05]]], dtype=torch.float64).log()
    s = torch.tensor([[[0.6, 0.1, 0.3]]], dtype=torch.float64).log()
    mask = torch.ones(1, 1, dtype=torch.bool)
    value, gradient, found = evaluate(t, s, mask, Divergence(k=1, beta=2.0), stats=True)
    wanted = {"alpha_t": 0.2, "alpha_s": 0.4, "kl1": 0.09152, "kl2": 0.54931, "beta_x": 10.0}
    assert {name: round(float(found[name]), 5) for name in wanted} == wanted
    assert float(value) == pytest.approx(1.190129, abs=1e-6)  # the card's 1.19014 adds up rounded parts
    assert gradient.flatten().tolist() == pytest.approx([-0.2, -0.95, 1.15], abs=1e-12)
    assert float(evaluate(t, s, mask, Divergence(kind="kl"))[0]) == pytest.approx(0.20138, abs=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_point(kind):
    """Oracle 5: equal distributions give 0 and no gradient, also where logits differ by a constant."""
    t, _, mask, labels = example()
    for k in (1, 5, V - 1, V):
        for beta in (0.5, 2.0, 10.0):
            value, gradient, _ = evaluate(t, t + 3.0, mask, Divergence(kind=kind, k=k, beta=beta), labels=labels)
            assert value.abs().max() < 1e-13 and gradient.abs().max() < 1e-13


def test_k1_is_dkd_on_the_teachers_choice():
    """Oracle 6: per row, beta of DKD = beta(X) alpha^T at each position; the public code's masking by -1000 is avoided."""
    t, s, mask, _ = example(1, 1)
    _, _, found = evaluate(t, s, mask, Divergence(k=1, beta=2.0), stats=True)
    x = float(found["beta_x"][0] * found["alpha_t"][0])
    ours = evaluate(t, s, mask, Divergence(k=1, beta=2.0))
    theirs = evaluate(t, s, mask, Divergence(kind="dkd", target="teacher_argmax", alpha=1.0, beta=x))
    assert torch.allclose(ours[0], theirs[0], atol=1e-13) and torch.allclose(ours[1], theirs[1], atol=1e-13)
    # TCKD and NCKD as in mdistiller's code: a two-way KL, and a softmax with the target pushed out
    which = int(t[0, 0].argmax())
    pt, ps = t[0, 0].softmax(-1), s.detach()[0, 0].softmax(-1)
    two = lambda p: torch.stack([p[which], 1 - p[which]])  # noqa: E731
    target = (two(pt) * (two(pt) / two(ps)).log()).sum()
    pushed = torch.zeros(V, dtype=torch.float64)
    pushed[which] = 1000.0
    lt, ls = (t[0, 0] - pushed).log_softmax(-1), (s.detach()[0, 0] - pushed).log_softmax(-1)
    assert float(found["kl1"][0]) == pytest.approx(float(target), abs=1e-12)
    assert float(found["kl2"][0]) == pytest.approx(float((lt.exp() * (lt - ls)).sum()), abs=1e-12)


@pytest.mark.parametrize("k", [V - 1, V, V + 5])
def test_a_tail_of_one_token_has_no_shape(k):
    """Oracle 7a and the limit K = V: beta has no effect and the loss is KL."""
    t, s, mask, _ = example()
    kl, gradient, _ = evaluate(t, s, mask, Divergence(kind="kl"))
    for beta in (0.0, 2.0, 50.0):
        value, found, numbers = evaluate(t, s, mask, Divergence(k=k, beta=beta), stats=True)
        assert torch.allclose(value, kl, atol=1e-13) and torch.allclose(found, gradient, atol=1e-13)
        assert not numbers["kl2"].any()


@pytest.mark.parametrize("k", [V, V + 5])
def test_the_top_of_all_tokens_is_all(k):
    t, s, mask, _ = example()
    kl, gradient, _ = evaluate(t, s, mask, Divergence(kind="kl"))
    value, found, numbers = evaluate(t, s, mask, Divergence(kind="topk_only", k=k), stats=True)
    assert torch.allclose(value, kl, atol=1e-13) and torch.allclose(found, gradient, atol=1e-13)
    assert not numbers["alpha_t"].any() and numbers["tail_share"].max() < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_shift_and_permutation_change_nothing(kind):
    """Oracle 7b."""
    t, s, mask, labels = example()
    one = Divergence(kind=kind, k=3)
    value, gradient, _ = evaluate(t, s, mask, one, labels=labels)
    shifted = evaluate(t + 5.0, s - 7.0, mask, one, labels=labels)
    assert torch.allclose(value, shifted[0], atol=1e-12) and torch.allclose(gradient, shifted[1], atol=1e-12)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(4))
    inverse = order.argsort()
    permuted = evaluate(t[..., order], s[..., order], mask, one, labels=inverse[labels])
    assert torch.allclose(value, permuted[0], atol=1e-12) and torch.allclose(gradient[..., order], permuted[1], atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_other_rows_have_no_part(kind):
    """Oracle 8: more padding, whatever stands in it, changes nothing; a batch is the sum of its rows."""
    t, s, mask, labels = example()
    s = s.detach()
    one = Divergence(kind=kind, k=3)
    value, gradient, _ = evaluate(t, s, mask, one, labels=labels)
    junk = torch.full((2, 5, V), math.nan, dtype=torch.float64)
    wide = [torch.cat([x, junk], 1) for x in (t, s)]
    more = torch.cat([mask, torch.zeros_like(mask)], 1)
    longer = evaluate(*wide, more, one, labels=torch.cat([labels, labels], 1))
    assert torch.equal(longer[0][:, :5], value) and not longer[0][:, 5:].any()
    assert torch.equal(longer[1][:, :5], gradient) and not longer[1][:, 5:].any()
    for b in range(2):
        alone = evaluate(t[b : b + 1], s[b : b + 1], mask[b : b + 1], one, labels=labels[b : b + 1])
        assert torch.allclose(alone[0][0], value[b], atol=1e-14) and torch.allclose(alone[1][0], gradient[b], atol=1e-14)


def test_beta_is_of_each_row():
    """The two rows of oracle 8 have different weights, so a mean over the batch would show."""
    t, s, mask, _ = example()
    _, _, found = evaluate(t, s, mask, Divergence(k=3))
    assert abs(found["beta_x"][0] - found["beta_x"][1]) > 0.1
    sharp = torch.zeros(1, 2, V, dtype=torch.float64)
    sharp[..., 0] = 40.0
    _, _, found = evaluate(sharp, sharp, mask[:1, :2], Divergence(k=1))
    assert found["beta_x"].tolist() == [LARGEST_BETA]
    empty, gradient, found = evaluate(t, s, torch.zeros_like(mask), Divergence(k=3), stats=True)
    assert not empty.any() and not gradient.any() and torch.isfinite(found["beta_x"]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_in_float32_inside(kind):
    """Oracle 9a: bfloat16 logits against float64 of the same logits, V = 512."""
    t, s, mask, labels = example(2, 8, 512, torch.bfloat16)
    one = Divergence(kind=kind, k=10)
    value, gradient, _ = evaluate(t, s, mask, one, labels=labels)
    exact, wanted, _ = evaluate(t.double(), s.detach().double(), mask, one, labels=labels)
    assert value.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert ((value - exact).abs() / exact.clamp(min=1e-9)).max() < 1e-3
    assert ((gradient - wanted).norm() / wanted.norm()) < 4e-3  # what rounding a gradient to bfloat16 costs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tail_of_almost_nothing(dtype):
    """Oracle 9b: alpha^T = 1e-9 and smaller, on either side."""
    for gap in (20.7, 60.0, 200.0):
        sharp = torch.zeros(1, 3, 8, dtype=dtype)
        sharp[..., 0] = gap
        flat = drawn(1, 3, 8, dtype=dtype)
        mask = torch.ones(1, 3, dtype=torch.bool)
        same = flat.clone()
        same[..., 0] = 8.0  # its most likely token is that of `sharp`, whose tail is then nothing
        for a, b in ((sharp, flat), (flat, sharp), (same, sharp), (sharp, sharp)):
            for kind in KINDS:
                one = Divergence(kind=kind, k=1, target="teacher_argmax")
                value, gradient, found = evaluate(a, b, mask, one, stats=True)
                assert all(torch.isfinite(x).all() for x in (value, gradient, *found.values())), (kind, gap)
    _, _, found = evaluate(sharp * (20.7 / 200), flat, mask, Divergence(k=1), stats=True)
    assert found["alpha_t"][0] == pytest.approx(7 * math.exp(-20.7), rel=0.1)


def test_limits_of_k_and_beta():
    """Oracle 10: K = 0 is beta KL exactly; with beta = 0 the tail moves as a whole."""
    t, s, mask, _ = example()
    kl, gradient, _ = evaluate(t, s, mask, Divergence(kind="kl"))
    value, found, numbers = evaluate(t, s, mask, Divergence(k=0, beta=3.0), stats=True)
    assert torch.allclose(value, 3 * kl, atol=1e-12) and torch.allclose(found, 3 * gradient, atol=1e-12)
    assert numbers["kl1"].abs().max() < 1e-13 and torch.allclose(numbers["kl2"], kl[mask], atol=1e-13)
    value, found, numbers = evaluate(t, s, mask, Divergence(k=4, beta=0.0), stats=True)
    assert torch.allclose(value[mask], numbers["kl1"], atol=1e-14)
    tail = t[0, 0].argsort(descending=True)[4:]
    ratio = found[0, 0, tail] / s.detach()[0, 0].softmax(-1)[tail]
    assert ratio.std() < 1e-13 and ratio.abs().min() > 1e-3


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_chunks_change_nothing(kind):
    t, s, mask, labels = example(3, 7)
    one = Divergence(kind=kind, k=3)
    upstream = drawn(3, 7, seed=9)
    options = {"labels": labels, "weight": 0.7, "ce_weight": 0.3, "upstream": upstream, "stats": True}
    value, gradient, found = evaluate(t, s, mask, one, **options)
    for chunk in (1, 2, 5, 100):
        other = evaluate(t, s, mask, one, chunk=chunk, **options)
        assert torch.allclose(other[0], value, atol=1e-14) and torch.allclose(other[1], gradient, atol=1e-14)
        assert found.keys() == other[2].keys() and all(torch.allclose(found[n], other[2][n], atol=1e-14) for n in found)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_cross_entropy_beside_it(temperature):
    """weight x divergence + ce_weight x cross-entropy, the latter always at temperature 1; kind none needs no teacher."""
    t, s, mask, labels = example()
    one = Divergence(kind="kl", temperature=temperature)
    value, gradient, _ = evaluate(t, s, mask, one)
    ce = torch.nn.functional.cross_entropy(s.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    (wanted,) = torch.autograd.grad(ce[mask].sum(), s)
    both = evaluate(t, s, mask, one, labels=labels, weight=0.5, ce_weight=2.0)
    assert torch.allclose(both[0][mask], (0.5 * value + 2 * ce.detach())[mask], atol=1e-13)
    assert torch.allclose(both[1], 0.5 * gradient + 2 * wanted, atol=1e-13)
    assert torch.allclose(both[2]["ce"], ce.detach()[mask]) and torch.allclose(both[2]["divergence"], value[mask])
    alone = evaluate(None, s, mask, Divergence(kind="none"), labels=labels, ce_weight=1.0)
    assert torch.allclose(alone[0][mask], ce.detach()[mask]) and torch.allclose(alone[1], wanted, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_unused_columns_have_no_part(kind):
    t, s, mask, labels = example()
    s = s.detach()
    one = Divergence(kind=kind, k=3)
    value, gradient, _ = evaluate(t, s, mask, one, labels=labels, ce_weight=1.0)
    junk = 30 * torch.ones(2, 5, 4, dtype=torch.float64)
    wide_t, wide_s = torch.cat([t, junk], -1), torch.cat([s, junk, junk], -1)
    found = evaluate(wide_t, wide_s, mask, one, labels=labels, ce_weight=1.0, vocabulary=V)
    assert torch.allclose(found[0], value, atol=1e-14) and torch.allclose(found[1][..., :V], gradient, atol=1e-14)
    assert not found[1][..., V:].any()
    places = torch.arange(V) + torch.arange(V) // 3  # every fourth column is unused
    holed_t, holed_s = (torch.full((2, 5, 16), 30.0, dtype=torch.float64) for _ in range(2))
    holed_t[..., places], holed_s[..., places] = t, s
    for ragged in (mask, torch.ones_like(mask)):
        value, gradient, _ = evaluate(t, s, ragged, one, labels=labels, ce_weight=1.0)
        found = evaluate(holed_t, holed_s, ragged, one, labels=places[labels], ce_weight=1.0, vocabulary=places)
        assert torch.allclose(found[0], value, atol=1e-14) and torch.allclose(found[1][..., places], gradient, atol=1e-14)
        assert not found[1][..., 3].any()


def test_inputs_are_left_alone_and_a_gradient_is_taken_once():
    t, s, mask, _ = example(dtype=torch.float32)
    mask[:] = True
    before = t.clone(), s.detach().clone()
    value, _ = loss(t, s, mask, Divergence(k=3))
    value.sum().backward(retain_graph=True)
    assert torch.equal(t, before[0]) and torch.equal(s, before[1])
    with pytest.raises(RuntimeError, match="can be taken once"):
        value.sum().backward()
    with torch.no_grad():
        assert not loss(t, s, mask, Divergence(k=3))[0].requires_grad
    value, _ = loss(t, s, mask, Divergence(k=3))
    gc.disable()  # what is kept then is kept by a reference, not by a cycle that waits for the collector
    try:
        kept = weakref.ref(value.grad_fn.next_functions[0][0].gradient)
        value.sum().backward()
        s.grad = value = None
        assert kept() is None
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="do not fit"):
        loss(t[..., :-1], s, mask, Divergence())
    with pytest.raises(ValueError, match="need labels"):
        loss(t, s, mask, Divergence(kind="dkd"))
