"""Oracles of PEAR's weights (the numbers are those of the method's card)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.sft import pear

WIDE = {"clip_delta": (-50.0, 50.0), "clip_log": (-100.0, 100.0)}
LEVELS = ("sequence", "token", "block")


def row(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def weights_of(delta, level, **options):
    """Weights of one document given its log ratios (behaviour log-probability 0)."""
    theta = row(delta)
    return pear.weights(theta, torch.zeros_like(theta), torch.ones_like(theta, dtype=torch.bool), level, **options)[0][0]


def reference(delta, level, gamma, block, clip_delta, clip_log):
    """The card's equations as a plain loop over one document."""
    d = [min(max(x, clip_delta[0]), clip_delta[1]) for x in delta]
    total, result = len(d), []
    for t in range(total):
        if level == "sequence":
            log_g = sum(d)
        elif level == "token":
            log_g = (total - 1 - t) * math.log(gamma) + sum(d[t + 1 :])
        else:
            end = min((t // block + 1) * block, total) - 1
            log_g = (total - 1 - end) * math.log(gamma) + sum(d[end + 1 :])
        result.append(math.exp(min(max(log_g, clip_log[0]), clip_log[1])))
    return result


def test_hand_example():
    delta = [0.1, -0.2, 0.3]
    assert weights_of(delta, "token", gamma=0.9, **WIDE).tolist() == pytest.approx(
        [0.81 * math.exp(0.1), 0.9 * math.exp(0.3), 1.0]
    )
    assert weights_of(delta, "token", gamma=0.9, **WIDE).tolist() == pytest.approx([0.8952, 1.2149, 1.0], abs=1e-4)
    assert weights_of(delta, "sequence", gamma=0.9, **WIDE).tolist() == pytest.approx([math.exp(0.2)] * 3)
    assert weights_of(delta, "block", gamma=0.9, block=2, **WIDE).tolist() == pytest.approx([0.9 * math.exp(0.3)] * 2 + [1.0])


@pytest.mark.parametrize("level", LEVELS)
def test_equal_policies_give_plain_sft(level):
    assert weights_of([0.0] * 7, level, gamma=1.0, block=3).tolist() == [1.0] * 7


def test_on_policy_data_gives_pure_discount():
    w = weights_of([0.0] * 5, "token", gamma=0.9)
    assert w.tolist() == pytest.approx([0.9 ** (4 - t) for t in range(5)])


def test_block_limits():
    delta = [0.3, -0.1, 0.2, -0.4, 0.1]
    token = weights_of(delta, "token", gamma=0.97, **WIDE)
    assert torch.allclose(weights_of(delta, "block", gamma=0.97, block=1, **WIDE), token)
    for block in (5, 6, 100):  # one block holds everything: no later token is left, so plain SFT (not sequence)
        assert weights_of(delta, "block", gamma=0.97, block=block, **WIDE).tolist() == [1.0] * 5


def test_sequence_is_first_ratio_times_token_weight():
    delta = [0.3, -0.1, 0.2]
    first = weights_of(delta, "token", gamma=1.0, **WIDE)[0]
    assert weights_of(delta, "sequence", **WIDE)[0].item() == pytest.approx(math.exp(0.3) * first.item())


def test_single_token_and_empty_mask():
    for level in ("token", "block"):
        assert weights_of([0.7], level, **WIDE).tolist() == [1.0]
    zeros = torch.zeros(2, 3)
    w, statistics = pear.weights(zeros, zeros, torch.zeros(2, 3, dtype=torch.bool), "token")
    assert w.tolist() == zeros.tolist() and statistics == {}


def test_clip_order_and_constants():
    """delta is clipped before it is summed, then log G; the floor is exp(-10), never 0, the cap exp(5)."""
    low = weights_of([-1.0] * 200, "token", gamma=1.0)
    assert low[0].item() == pytest.approx(math.exp(-10)) and low[-1].item() == 1.0
    # 0.08 per token: the floor of -10 is reached 125 tokens before the end, not 10 tokens before it
    assert low[199 - 124].item() == pytest.approx(math.exp(-9.92)) and low[199 - 125].item() == pytest.approx(math.exp(-10))
    high = weights_of([1.0] * 200, "token", gamma=1.0)
    assert high[0].item() == pytest.approx(math.exp(5))
    assert high[199 - 16].item() == pytest.approx(math.exp(4.8)) and high[199 - 17].item() == pytest.approx(math.exp(5))
    mixed = weights_of([0.0, 5.0, -5.0], "token", gamma=1.0)  # clipped first: 0.3 - 0.08; clipping the sum would give 0
    assert mixed[0].item() == pytest.approx(math.exp(0.22))


@given(
    data=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=12), min_size=1, max_size=5),
    level=st.sampled_from(LEVELS),
    block=st.integers(1, 6),
    gamma=st.floats(0.5, 1.0),
    side=st.sampled_from(["left", "right"]),
    extra=st.integers(0, 4),
)
def test_vectorised_equals_loop_on_ragged_batches(data, level, block, gamma, side, extra):
    width = max(map(len, data)) + extra
    theta, mask = torch.full((len(data), width), 9.0, dtype=torch.float64), torch.zeros(len(data), width, dtype=torch.bool)
    for i, delta in enumerate(data):
        at = slice(0, len(delta)) if side == "right" else slice(width - len(delta), width)
        theta[i, at], mask[i, at] = torch.tensor(delta, dtype=torch.float64), True
    options = {"gamma": gamma, "block": block, "clip_delta": (-1.0, 0.5), "clip_log": (-3.0, 2.0)}
    w, _ = pear.weights(theta, torch.zeros_like(theta), mask, level, **options)
    assert (w[~mask] == 0).all()
    for i, delta in enumerate(data):
        assert w[i][mask[i]].tolist() == pytest.approx(reference(delta, level, **options), rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_packed_documents_do_not_leak(level):
    """Three documents in one row, with prompt gaps between them, weigh as they do alone."""
    documents = [[0.1, -0.3, 0.2], [0.4], [-0.2, 0.1, 0.3, -0.1, 0.2]]
    theta, mask, ids = [], [], []
    for number, delta in enumerate(documents):
        theta += [7.0, 7.0, *delta]
        mask += [False, False, *[True] * len(delta)]
        ids += [number] * (2 + len(delta))
    options = {"gamma": 0.9, "block": 2, "clip_delta": (-1.0, 1.0), "clip_log": (-10.0, 5.0)}
    packed = row(theta)
    w, _ = pear.weights(packed, torch.zeros_like(packed), torch.tensor([mask]), level, documents=torch.tensor([ids]), **options)
    alone = [value for delta in documents for value in reference(delta, level, **options)]
    assert w[torch.tensor([mask])].tolist() == pytest.approx(alone)


def test_weights_carry_no_gradient_and_statistics_are_right():
    theta = torch.tensor([[-0.5, -2.0, -0.1]], requires_grad=True)
    w, statistics = pear.weights(theta, torch.full((1, 3), -0.4), torch.ones(1, 3, dtype=torch.bool), "sequence", **WIDE)
    assert not w.requires_grad
    delta = sum([-0.1, -1.6, 0.3])
    assert statistics["weight_mean"] == pytest.approx(math.exp(delta), rel=1e-5)
    assert statistics["weight_ess"] == pytest.approx(1.0) and statistics["delta_mean"] == pytest.approx(delta / 3, rel=1e-5)
    ragged, numbers = pear.weights(
        torch.zeros(1, 200), torch.ones(1, 200), torch.ones(1, 200, dtype=torch.bool), "token", gamma=1.0
    )
    assert numbers["weight_floor"] == pytest.approx((ragged <= math.exp(-10) * (1 + 1e-6)).double().mean().item())
    assert numbers["weight_cap"] == 0.0
    kept = ragged[0].double()
    assert numbers["weight_ess"] == pytest.approx((kept.sum() ** 2 / (kept**2).sum() / 200).item(), rel=1e-5)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes differ"):
        pear.weights(torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 3, dtype=torch.bool), "token")


# --- the enumeration oracle: all 81 sequences of a tabular policy pair, V = 3, T = 4 ---

V, T = 3, 4
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))


def prefixes():
    """Index of each sequence's prefix before token t, in a table of all prefixes: int64 [81, T]."""
    number = {prefix: i for i, prefix in enumerate(p for t in range(T) for p in itertools.product(range(V), repeat=t))}
    return torch.tensor([[number[tuple(s[:t])] for t in range(T)] for s in SEQUENCES.tolist()])


def sequence_logps(logits):
    """log-probability of each token of each of the 81 sequences: [81, T]."""
    return logits.log_softmax(-1)[prefixes(), SEQUENCES]


@pytest.fixture(scope="module")
def policies():
    generator = torch.Generator().manual_seed(7)
    count = sum(V**t for t in range(T))
    theta = torch.randn(count, V, generator=generator, dtype=torch.float64, requires_grad=True)
    beta = torch.randn(count, V, generator=generator, dtype=torch.float64)
    return theta, sequence_logps(beta)


def expected_gradient(theta, logp_beta, w):
    """Gradient of E_{y ~ beta}[sum_t w_t (-log pi(y_t))] by enumeration."""
    probability = logp_beta.sum(1).exp()
    loss = (probability[:, None] * w * -sequence_logps(theta)).sum()
    return torch.autograd.grad(loss, theta)[0]


def enumerated_weights(theta, logp_beta, level, **options):
    return pear.weights(sequence_logps(theta), logp_beta, torch.ones(81, T, dtype=torch.bool), level, **options)[0]


@pytest.mark.parametrize(("level", "block"), [("token", 1), ("block", 2), ("block", 3)])
def test_expected_token_and_block_gradients_equal_sft(policies, level, block):
    theta, logp_beta = policies
    plain = expected_gradient(theta, logp_beta, torch.ones(81, T, dtype=torch.float64))
    w = enumerated_weights(theta, logp_beta, level, gamma=1.0, block=block, **WIDE)
    assert (expected_gradient(theta, logp_beta, w) - plain).abs().max() < 1e-14
    assert plain.abs().max() > 1e-2


def test_expected_sequence_gradient_is_zero(policies):
    theta, logp_beta = policies
    w = enumerated_weights(theta, logp_beta, "sequence", **WIDE)
    assert expected_gradient(theta, logp_beta, w).abs().max() < 1e-14
    assert (logp_beta.sum(1).exp() * w[:, 0]).sum().item() == pytest.approx(1.0, abs=1e-12)  # sum_y beta w = 1


def test_discount_shrinks_early_tokens_in_expectation(policies):
    theta, logp_beta = policies
    w = enumerated_weights(theta, logp_beta, "token", gamma=0.8, **WIDE)
    mean = (logp_beta.sum(1).exp()[:, None] * w).sum(0)
    assert mean.tolist() == pytest.approx([0.8 ** (T - 1 - t) for t in range(T)], abs=1e-12)


def test_a_document_id_may_come_again_later_in_the_row():
    values = row([0.1, 0.2, 0.3, 0.4])
    everything = torch.ones(1, 4, dtype=torch.bool)
    again, new = (
        pear.weights(values, torch.zeros_like(values), everything, "token", gamma=1.0, documents=torch.tensor([ids]), **WIDE)[0]
        for ids in ([0, 1, 0, 0], [0, 1, 2, 2])
    )
    assert again.tolist() == new.tolist()
    assert again[0].tolist() == pytest.approx([1.0, 1.0, math.exp(0.4), 1.0])
