"""PEAR: per-token weights on the SFT loss from off-policy-evaluation importance ratios (arXiv 2602.01058).

With y_1..y_T the response (prompt excluded, EOS included), pi the model being trained and beta the policy that wrote
the data:  delta_t = clip(log pi(y_t|.) - log beta(y_t|.), l, u)  and

- sequence:  log G_t = sum_{j=1..T} delta_j                              (own token and past included)
- token:     log G_t = (T - t) log gamma + sum_{j>t} delta_j             (suffix only, so G_T = 1)
- block:     log G_t = (T - e) log gamma + sum_{j>e} delta_j             (e: last token of t's block of size B)

then  G_t = exp(clip(log G_t, -10, 5)), without gradient. With infinite data, gamma = 1 and no clipping the expected
token and block gradients equal the plain SFT gradient and the expected sequence gradient is zero, so every effect
comes from finite data, from clipping and from gamma < 1.

The equations are second-hand (the paper's body was not readable to us; three independent sources agree). Not stated
anywhere: the normaliser over tokens; see :mod:`posttrain.sft.losses`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["sequence", "token", "block"]


class Layout(NamedTuple):
    """Response tokens as one dense row per document, whatever the padding or packing of the batch.

    row, rank: int64 [N], document and 0-based position of each response token, in the order of `mask.nonzero()`.
    length: int64 [D], response tokens per document.
    """

    row: Tensor
    rank: Tensor
    length: Tensor


def layout(mask: Tensor, documents: Tensor | None = None) -> Layout:
    """Find the documents of a batch. mask: bool [B, T]; documents: int [B, T] ids that are constant within a packed
    document and differ between neighbours, or None if a row is one document."""
    import torch

    b, t = mask.nonzero(as_tuple=True)
    if documents is not None:  # numbered by where the id changes: an id may come again later in the row
        documents = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0)).cumsum(1)
    key = b if documents is None else b * (int(documents.max()) + 1 if documents.numel() else 1) + documents[b, t].long()
    _, row, length = torch.unique(key, return_inverse=True, return_counts=True)
    order = torch.argsort(row, stable=True)
    starts = torch.cumsum(length, 0) - length
    rank = torch.empty_like(row)
    rank[order] = torch.arange(len(row), device=row.device) - starts[row[order]]
    return Layout(row, rank, length)


def log_weights(delta: Tensor, length: Tensor, level: Level, gamma: float, block: int) -> Tensor:
    """log G_t before the final clip.

    delta: float [D, R], clipped log ratios, zero beyond each document's length. length: int64 [D].
    Returns [D, R] in delta's dtype; values beyond the length are meaningless.
    """
    import torch

    total = delta.sum(1, keepdim=True)
    if level == "sequence":
        return total.expand_as(delta)
    suffix = delta.flip(1).cumsum(1).flip(1) - delta  # exclusive: sum over j > t, without cancellation against `total`
    rank = torch.arange(delta.shape[1], device=delta.device)[None]
    last = (length[:, None] - 1).clamp(min=0)
    end = rank.expand_as(delta) if level == "token" else ((rank // block + 1) * block - 1)
    end = torch.minimum(end, last)
    return suffix.gather(1, end) + (last - end).to(delta.dtype) * math.log(gamma)  # int64 x float would be float32


def weights(
    logp_theta: Tensor,
    logp_beta: Tensor,
    mask: Tensor,
    level: Level,
    *,
    gamma: float = 0.999,
    block: int = 4,
    clip_delta: tuple[float, float] = (-0.08, 0.3),
    clip_log: tuple[float, float] = (-10.0, 5.0),
    documents: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """PEAR weights and their statistics.

    logp_theta, logp_beta: float [B, T], log-probabilities in nats of the label tokens; mask: bool [B, T], true on
    response tokens; documents: see :func:`layout`. Returns (weights [B, T], float32 or float64 like the input, without
    gradient, zero outside the mask; statistics: mean, ess = (sum w)^2 / (N sum w^2), share at floor and at cap, mean
    unclipped delta). An empty mask gives zeros and no statistics.
    """
    import torch

    if logp_theta.shape != logp_beta.shape or mask.shape != logp_theta.shape:
        raise ValueError(
            f"shapes differ: logp_theta {tuple(logp_theta.shape)}, logp_beta {tuple(logp_beta.shape)}, mask {tuple(mask.shape)}"
        )
    with torch.no_grad():
        dtype = torch.float64 if logp_theta.dtype == torch.float64 else torch.float32
        result = torch.zeros(mask.shape, dtype=dtype, device=logp_theta.device)
        mask = mask.bool()
        if not mask.any():
            return result, {}
        raw = logp_theta[mask].to(dtype) - logp_beta[mask].to(dtype)
        where = layout(mask, documents)
        dense = torch.zeros(len(where.length), int(where.length.max()), dtype=dtype, device=raw.device)
        dense[where.row, where.rank] = raw.clamp(*clip_delta)
        log_g = log_weights(dense, where.length, level, gamma, block)[where.row, where.rank]
        w = log_g.clamp(*clip_log).exp()
        result[mask] = w
        statistics = {
            "weight_mean": w.mean().item(),
            "weight_ess": (w.sum() ** 2 / (w**2).sum() / len(w)).item(),
            "weight_floor": (log_g <= clip_log[0]).double().mean().item(),
            "weight_cap": (log_g >= clip_log[1]).double().mean().item(),
            "delta_mean": raw.mean().item(),
        }
    return result, statistics
