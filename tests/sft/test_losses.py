"""The weighted loss: detach, normalisers, KL on the stored part of a distribution, DFT."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.sft import losses

OPTIONS = {"gamma": 0.999, "block": 4, "clip_delta": (-1.0, 0.5), "clip_log": (-10.0, 5.0)}


def test_gradient_treats_weights_as_constants():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (2, 5), generator=generator)
    beta = -torch.rand(2, 5, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)

    def logp_of(x):
        return x.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    def weights_at(x):
        wide = OPTIONS | {"clip_delta": (-50.0, 50.0)}  # a clipped ratio would not move with theta
        return losses.token_weights("pear_sequence", logp_of(x), beta, mask, **wide)[0]

    live = logits.clone().requires_grad_()
    loss = losses.weighted_loss(-logp_of(live), weights_at(live), mask, 10)
    (gradient,) = torch.autograd.grad(loss, live)
    frozen = weights_at(logits)
    other = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad((frozen * -logp_of(other)).sum() / 10, other)
    assert torch.allclose(gradient, expected, atol=1e-15)
    # The full expression, with weights that follow theta, has another derivative: finite differences see it.
    step = torch.zeros_like(logits)
    step[0, 0, labels[0, 0]] = 1e-6

    def full(x):
        return ((weights_at(x) * -logp_of(x)).sum() / 10).item()

    numeric = (full(logits + step) - full(logits - step)) / 2e-6
    assert abs(numeric - gradient[0, 0, labels[0, 0]].item()) > 1e-3


def test_dft_weight_is_own_probability():
    logp = torch.tensor([[-0.5, -1.5, -3.0]])
    w, statistics = losses.token_weights("dft", logp, torch.zeros(1, 3), torch.tensor([[True, True, False]]), **OPTIONS)
    assert w.tolist()[0] == pytest.approx([math.exp(-0.5), math.exp(-1.5), 0.0])
    assert statistics["weight_mean"] == pytest.approx((math.exp(-0.5) + math.exp(-1.5)) / 2)


def test_token_is_weight_is_clipped_ratio():
    logp, beta = torch.tensor([[-1.0, -9.0, -1.0]]), torch.tensor([[-1.2, -1.0, -9.0]])
    w, _ = losses.token_weights("token_is", logp, beta, torch.ones(1, 3, dtype=torch.bool), **OPTIONS)
    assert w.tolist()[0] == pytest.approx([math.exp(0.2), math.exp(-1.0), math.exp(0.5)])


def test_no_response_tokens_give_zero_not_nan():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for weighting in ("sft", "dft", "token_is", "pear_token", "pear_block", "pear_sequence"):
        w, _ = losses.token_weights(weighting, torch.full((2, 3), -1.0), torch.zeros(2, 3), nothing, **OPTIONS)
        assert losses.weighted_loss(torch.full((2, 3), torch.nan), w, nothing, 0).item() == 0.0


def test_norms():
    w = torch.tensor([[2.0, 4.0, 0.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert losses.normalise(w, mask, "tokens") is w
    assert losses.normalise(w, mask, "self")[0].tolist() == pytest.approx([2 / 3, 4 / 3, 0.0])
    assert losses.normalise(w, mask, "self")[1].tolist() == [1.0, 1.0, 1.0]
    assert losses.normalise(w, mask, "per_sequence").sum(1).tolist() == pytest.approx([3.0, 1.0])
    assert losses.normalise(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), "self").tolist() == [[0.0, 0.0]]


def test_negative_traces_are_pushed_down_within_bounds():
    mask = torch.ones(3, 2, dtype=torch.bool)
    w = losses.negative_weights(torch.tensor([[0.0, 0.0], [-9.0, -9.0], [5.0, 5.0]]), torch.zeros(3, 2), mask, 0.1)
    assert w[:, 0].tolist() == pytest.approx([-0.1, -0.1 * 0.01, -0.1 * 2.0])


# --- KL to the stored distribution, against float64 brute force over the whole vocabulary ---


def brute_force(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def stored(p, k):
    best = torch.tensor(p, dtype=torch.float64).log().topk(k)
    return best.indices[None], best.values[None].float()


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_kl_is_a_lower_bound_and_exact_at_full_support(seed, k):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(50, generator=generator, dtype=torch.float64).mul(2).softmax(0)
    logits = torch.randn(1, 50, generator=generator, dtype=torch.float64).mul(2)
    exact = brute_force(p.tolist(), logits.softmax(-1)[0].tolist())
    ids, logps = stored(p.tolist(), k)
    value = losses.kl_to_stored(logits, ids, logps).item()
    assert -1e-5 <= value <= exact + 1e-4
    if k == 50:
        assert value == pytest.approx(exact, abs=1e-4)


def test_kl_identities():
    logits = torch.tensor([[1.0, 0.0, -2.0]])
    ids, logps = stored(logits.softmax(-1)[0].tolist(), 3)
    assert losses.kl_to_stored(logits, ids, logps).item() == pytest.approx(0.0, abs=1e-6)
    ids, logps = torch.tensor([[0, 1]]), torch.tensor([[math.log(0.9), math.log(0.1)]])
    forward = losses.kl_to_stored(torch.tensor([[math.log(0.5), math.log(0.5)]]), ids, logps).item()
    assert forward == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-6)  # KL(beta || pi), not the reverse


def test_unused_slots_and_padded_columns_change_nothing():
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    ids, logps = torch.tensor([[2, 0], [1, 0]]), torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    plain = losses.kl_to_stored(logits, ids, logps)
    assert plain.tolist() == pytest.approx([-logits.log_softmax(-1)[0, 2].item(), -logits.log_softmax(-1)[1, 1].item()])
    wide = torch.cat([logits, torch.full((2, 128), -torch.inf)], dim=1)
    assert torch.allclose(losses.kl_to_stored(wide, ids, logps), plain)
    inputs = logits.clone().requires_grad_()
    losses.kl_to_stored(inputs, ids, logps).sum().backward()
    assert torch.isfinite(inputs.grad).all()


def test_tail_bucket_has_a_right_gradient():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float().requires_grad_()
    p = torch.randn(3, 8, generator=torch.Generator().manual_seed(4)).softmax(-1)
    best = p.log().topk(3)
    assert torch.autograd.gradcheck(
        lambda x: losses.kl_to_stored(x, best.indices, best.values), (logits,), eps=1e-2, atol=1e-2, rtol=1e-2
    )


def exact_kl_with_tail(logits, ids, p_head):
    """float64 KL of (head, one tail bucket) against the same coarse-graining of softmax(logits)."""
    q = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    soft = q.softmax(-1)
    rest = torch.ones(len(logits), dtype=torch.bool)
    rest[ids] = False
    p_tail = 1 - sum(p_head)
    value = sum(p * (math.log(p) - soft[i].log()) for i, p in zip(ids, p_head, strict=True))
    value = value + p_tail * (math.log(p_tail) - soft[rest].sum().log())
    value.backward()
    return value.item(), q.grad


@pytest.mark.parametrize("peak", [0.0, 5.0, 15.0, 18.0, 40.0])
def test_tail_keeps_value_and_gradient_when_the_student_is_sharp(peak):
    """1 - sum(q) in float32 would be 0 here, and its gradient with it."""
    logits, ids, head = [peak, 0.0, 0.0, -1.0], [0], [0.7]
    expected, gradient = exact_kl_with_tail(logits, ids, head)
    live = torch.tensor([logits], requires_grad=True)
    value = losses.kl_to_stored(live, torch.tensor([ids]), torch.tensor([head]).log())
    value.sum().backward()
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(live.grad[0].double(), gradient, atol=1e-6)


def test_an_unused_slot_does_not_hide_a_used_token_zero():
    """Unused slots carry id 0; where token 0 is stored as well, it must not count into the tail."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    alone = losses.kl_to_stored(logits, torch.tensor([[0]]), torch.tensor([[math.log(0.6)]]))
    for ids, logps in (([[0, 0]], [[math.log(0.6), -torch.inf]]), ([[0, 0, 0]], [[math.log(0.6), -torch.inf, -torch.inf]])):
        assert losses.kl_to_stored(logits, torch.tensor(ids), torch.tensor(logps)).item() == pytest.approx(alone.item(), rel=1e-6)
