"""Divergence, sparsity, cosine, CKA and pooling against brute force and identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.evaluate import geometry
from posttrain.evaluate.geometry import Angle, Change, angle, change, cka, component, pooled
from tests.checkpoints import tiny


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# --- weights --------------------------------------------------------------------------------------------------


def test_two_percent_more_everywhere():
    old = torch.from_numpy(normal(30, 40)).float()
    found = change(old, 1.02 * old)
    assert found.divergence == pytest.approx(0.02, rel=1e-4)
    shares = found.unchanged()
    assert list(shares) == [f"unchanged_{t}pct" for t in ("0.1", "0.5", "1", "2", "5", "10")]
    assert shares["unchanged_1pct"] == 0 and shares["unchanged_0.1pct"] == 0
    assert shares["unchanged_5pct"] == 1 and shares["unchanged_10pct"] == 1 and found.identical == 0


def test_one_changed_element_is_one_of_n():
    old = torch.from_numpy(normal(25, 8)).float()
    new = old.clone()
    new[3, 4] *= 2
    found = change(old, new)
    assert all(1 - share == pytest.approx(1 / 200) for share in found.unchanged().values())
    assert found.identical == 199 and found.divergence == pytest.approx(abs(old[3, 4]).item() / old.norm().item())


def test_thresholds_are_of_elements():
    """Relative changes that are exact in binary: 1/2, 1/16 and 1/64 of powers of two, of both signs."""
    old = torch.tensor([1.0, -2.0, 4.0, 8.0])
    found = change(old, old * torch.tensor([1.5, 1 - 1 / 16, 1 + 1 / 64, 1.0]))
    assert found.below == (1, 1, 1, 2, 2, 3)  # at 0.1, 0.5, 1, 2, 5, 10 %
    assert Change(elements=4, below=found.below).unchanged()["unchanged_10pct"] == 0.75


def test_a_change_at_a_threshold_is_not_below_it():
    """1/200 and 1/20 are 0.5 % and 5 %; float32 would round the first below it."""
    for dtype in (torch.float32, torch.bfloat16):
        found = change(torch.tensor([200.0, 20.0], dtype=dtype), torch.tensor([201.0, 21.0], dtype=dtype))
        assert found.below == (0, 0, 1, 1, 1, 2)


def test_elements_near_zero_are_counted_apart():
    old = torch.tensor([0.0, 1e-13, -1e-13, 1e-11, 1.0])
    new = torch.tensor([0.0, 1.0, -1e-13, 1e-11, 1.0])
    found = change(old, new)
    assert (found.elements, found.near_zero, found.identical) == (5, 3, 4) and found.below == (2,) * 6
    assert found.unchanged()["unchanged_1pct"] == 1.0
    nothing = change(torch.zeros(3), torch.ones(3))
    assert nothing.divergence is None and set(nothing.unchanged().values()) == {None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_change_is_brute_force_whatever_the_chunks(dtype, monkeypatch):
    old = torch.from_numpy(normal(40, 25)).to(dtype)
    new = (old.float() * (1 + 0.03 * torch.from_numpy(normal(40, 25, seed=1)).float())).to(dtype)
    a, b = old.double().numpy(), new.double().numpy()
    relative = np.abs(b - a) / np.abs(a)
    whole = change(old.T, new.T)  # not contiguous
    monkeypatch.setattr(geometry, "CHUNK", 70)
    for found in (whole, change(old, new), change(old[:5], new[:5]).plus(change(old[5:], new[5:]))):
        assert found.elements == 1000 and found.identical == int((a == b).sum())
        assert found.below == tuple(int((relative < t).sum()) for t in geometry.THRESHOLDS)
        assert found.divergence == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-5)
        assert found.size == pytest.approx(float((a**2).sum()), rel=1e-12)


def test_a_sum_of_many_small_squares_keeps_its_digits():
    """float32 accumulation stalls: 1 + 2^22 * 1e-8 would stay 1."""
    old = torch.full((2**22,), 1e-4)
    old[0] = 1.0
    assert change(old, old).size == pytest.approx(1 + (2**22 - 1) * 1e-8, rel=1e-6)


def test_angles():
    base, a = torch.from_numpy(normal(6, 5)).float(), torch.from_numpy(normal(6, 5, seed=1)).float()
    assert angle(base, a, a).cosine == pytest.approx(1)
    assert angle(base, a, base + 3 * (a - base)).cosine == pytest.approx(1, rel=1e-6)
    assert angle(base, a, base - (a - base)).cosine == pytest.approx(-1, rel=1e-6)
    one, two = torch.zeros(4), torch.zeros(4)
    one[0], two[1] = 1, 5
    assert angle(torch.zeros(4), one, two).cosine == 0
    assert angle(base, base, a).cosine is None and Angle().cosine is None


def test_angle_is_brute_force_and_adds_up(monkeypatch):
    base, a, b = (torch.from_numpy(normal(9, 4, seed=s)).float() for s in range(3))
    x, y = (a - base).flatten().double().numpy(), (b - base).flatten().double().numpy()
    expected = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    monkeypatch.setattr(geometry, "CHUNK", 7)
    rows = angle(base[:2], a[:2], b[:2]).plus(angle(base[2:], a[2:], b[2:]))
    assert angle(base, a, b).cosine == pytest.approx(expected) and rows.cosine == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.11.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.k_norm.weight", "norm"),
        ("transformer.h.0.ln_1.weight", "norm"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.block_sparse_moe.router.layer.weight", "mlp"),
        ("model.layers.0.mamba.in_proj.weight", "ssm"),
        ("backbone.layers.0.mixer.A_log", "ssm"),
        ("backbone.layers.1.mixer.up_proj.weight", "mlp"),
        ("backbone.layers.2.mixer.k_proj.weight", "attention"),
        ("model.norm.weight", "norm"),
        ("something.weight", "other"),
    ],
)
def test_components(name, expected):
    assert component(name) == expected


# --- CKA ------------------------------------------------------------------------------------------------------


def hsic_form(x: np.ndarray, y: np.ndarray) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with linear Gram matrices and HSIC(K, L) = tr(K H L H) / (n - 1)^2."""
    n = len(x)
    centring = np.eye(n) - np.ones((n, n)) / n

    def hsic(k, m):
        return np.trace(k @ centring @ m @ centring) / (n - 1) ** 2

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


@given(st.integers(2, 30), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_cka_is_the_hsic_form(n, d, e, seed):
    x, y = normal(n, d, seed=seed) + 3, normal(n, e, seed=seed + 100)
    y[:, 0] += x[:, 0]
    assert cka(x, y) == pytest.approx(hsic_form(x, y), abs=1e-8)
    assert 0 <= cka(x, y) <= 1 + 1e-12 and cka(x, y) == pytest.approx(cka(y, x), abs=1e-12)


def test_cka_invariances():
    x = normal(50, 8)
    q, _ = np.linalg.qr(normal(8, 8, seed=1))
    moved = -0.3 * x @ q + normal(8, seed=2)
    assert cka(x, x) == pytest.approx(1) and cka(x, x, centred=False) == pytest.approx(1)
    assert cka(x, moved) == pytest.approx(1, abs=1e-12)
    assert cka(x, moved, centred=False) < 0.99
    assert cka(x, -0.3 * x @ q, centred=False) == pytest.approx(1)  # without a shift the diagnostic is invariant as well


def test_independent_states_are_unlike_unless_a_mean_hides_it():
    x, y = normal(200, 10), normal(200, 10, seed=1)
    assert cka(x, y) < 0.15
    assert cka(x + 20, y + 20, centred=False) > 0.99 and cka(x + 20, y + 20) == pytest.approx(cka(x, y))


def test_cka_is_float64():
    """A mean of 1e4 leaves float32 states no digits to centre with."""
    x = normal(40, 5)
    assert cka((x + 1e4).astype(np.float64), x) == pytest.approx(1, abs=1e-9)
    assert isinstance(cka(x.astype(np.float32), x.astype(np.float32)), float)


def test_constant_states_have_no_cka():
    with pytest.raises(UserError, match="do not vary over the texts"):
        cka(np.ones((4, 3)), normal(4, 3))


# --- pooling --------------------------------------------------------------------------------------------------

TEXTS = [[3, 4, 5, 6, 7, 8, 9], [5], [9, 9, 2], [4, 3, 2, 8, 1, 7, 6, 5, 9, 3], [2, 3]]


@pytest.fixture(scope="module")
def model():
    found, _ = tiny(seed=0)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(8 if p.ndim > 1 else 1)  # strong attention: a text that saw padding would differ plainly
    return found


def test_pooling_is_the_mean_over_the_tokens_of_each_text(model):
    found = pooled(model, TEXTS)
    assert found.shape == (3, len(TEXTS), 16) and found.dtype == np.float64
    for i, text in enumerate(TEXTS):
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.stack([s[0].double().mean(0) for s in states]).numpy()
        assert np.allclose(found[:, i], expected, atol=1e-6)


@pytest.mark.parametrize("batch", [2, 3, 99])
def test_batched_pooling_is_one_by_one(model, batch):
    one, many = pooled(model, TEXTS), pooled(model, TEXTS, batch)
    assert np.abs(one).max() > 0.1 and np.allclose(one, many, atol=1e-5)


def test_pooling_refuses_a_text_without_tokens(model):
    with pytest.raises(UserError, match="has no tokens"):
        pooled(model, [[1], []])


def test_pooling_leaves_no_dropout_on(model):
    model.train()
    pooled(model, TEXTS[:1])
    assert not model.training
