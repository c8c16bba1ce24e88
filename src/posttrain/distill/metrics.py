"""How far a student is from its teacher, exactly: KL and its two parts, tail masses, ranks, agreement, calibration.

Everything is computed from full distributions, nothing is sampled: greedy or top-p sampling would remove the tail. The
decomposition is that of :mod:`posttrain.distill.divergences`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EDGES = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10_000, 100_000, 1_000_000)  # ranks of the teacher, buckets [a, b)
NAMES = ("kl", "kl1", "kl2", "alpha_t", "alpha_s", "alpha_gap", "top1", "entropy_t", "spearman")
BINS = 10


def buckets(vocabulary: int) -> list[tuple[int, int]]:
    """Ranges [a, b) of teacher ranks, counted from 0, that cover a vocabulary."""
    cut = [edge for edge in EDGES if edge < vocabulary] + [vocabulary]
    return list(itertools.pairwise(cut))


def compare(teacher: Tensor, student: Tensor, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """({name: [n]}, bucket masses [n, buckets, 2]) of logits [n, V] of one dtype, computed in float64.

    kl, kl1, kl2 in nats for a head of the teacher's K largest (0 < K < V - 1); alpha_t, alpha_s: mass outside it, alpha_gap its
    absolute difference; top1: same argmax; entropy_t in nats; spearman: rank correlation of both log-probabilities over the
    teacher's tail (ties keep their order). Masses: teacher's and student's probability in each rank range of the teacher.
    """
    import torch

    order = teacher.argsort(dim=-1, descending=True, stable=True)
    lt, ls = (x.double().log_softmax(-1).gather(-1, order) for x in (teacher, student))  # by falling teacher probability
    pt, ps = lt.exp(), ls.exp()
    each = pt * (lt - ls)
    la_t, la_s = lt[:, k:].logsumexp(-1), ls[:, k:].logsumexp(-1)
    alpha, gap = la_t.exp(), la_t - la_s
    found = {"kl": each.sum(-1), "kl1": each[:, :k].sum(-1) + alpha * gap}
    tail = (lt[:, k:] - la_t[:, None]).exp()
    found["kl2"] = (tail * (lt[:, k:] - ls[:, k:])).sum(-1) - gap
    found |= {"alpha_t": alpha, "alpha_s": la_s.exp(), "alpha_gap": (alpha - la_s.exp()).abs()}
    found |= {"top1": (ls.argmax(-1) == 0).double(), "entropy_t": -(pt * lt).sum(-1)}
    found["spearman"] = rank_correlation(ls[:, k:])
    masses = [torch.stack([pt[:, a:b].sum(-1), ps[:, a:b].sum(-1)], -1) for a, b in buckets(teacher.shape[-1])]
    return found, torch.stack(masses, 1)


def rank_correlation(values: Tensor) -> Tensor:
    """Spearman's correlation [n] of [n, m] values with a falling sequence: 1 if each row falls. m >= 2; ties by place."""
    import torch

    m = values.shape[-1]
    ranks = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1).to(torch.float64)
    wanted = torch.arange(m, dtype=torch.float64, device=values.device)
    return 1 - 6 * (ranks - wanted).square().sum(-1) / (m * (m * m - 1))


def calibration(probabilities: Tensor, outcomes: Tensor, bins: int = BINS) -> Tensor:
    """Sums for the full expected calibration error: [bins, 3] float64 of (count, predicted, happened), to be added up.

    probabilities, outcomes: [n, V]; outcomes are one-hot rows of the next token, or its exact distribution where that is known.
    All (position, token) pairs, in bins of equal width by predicted probability (Full-ECE, arXiv 2406.11345; inferred).
    """
    import torch

    p, y = probabilities.reshape(-1).double(), outcomes.reshape(-1).double()
    which = (p * bins).long().clamp(max=bins - 1)
    sums = torch.zeros(bins, 3, dtype=torch.float64, device=p.device)
    return sums.index_add_(0, which, torch.stack([torch.ones_like(p), p, y], -1))


def full_ece(sums: Tensor, positions: int) -> float:
    """sum over bins of |predicted - happened| / positions: the error per position in units of probability, in [0, 2].

    Full-ECE's mean over all pairs is this divided by the vocabulary.
    """
    return float((sums[:, 1] - sums[:, 2]).abs().sum() / positions)
