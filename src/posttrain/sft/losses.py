"""SFT losses as one form: L = (1/N) sum_t sg[w_t] l_t over the response tokens of the global batch.

l_t: negative log-likelihood, or KL(beta || pi) on the stored part of the teacher's distribution. w_t: 1 (sft), pi(y_t)
(dft, arXiv 2508.05629), clipped ratio (token_is, an ablation), or PEAR's weights (:mod:`posttrain.sft.pear`).
N: number of response tokens of the global batch, since no source states PEAR's normaliser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from posttrain.sft import pear

if TYPE_CHECKING:
    from torch import Tensor

Weighting = Literal["sft", "dft", "token_is", "pear_token", "pear_block", "pear_sequence"]
Norm = Literal["tokens", "per_sequence", "self"]


def kl_to_stored(logits: Tensor, top_ids: Tensor, top_logps: Tensor) -> Tensor:
    """KL(beta || pi) per position from the K stored log-probabilities of beta and one bucket for the rest.

    logits: [N, V] of pi. top_ids: int64 [N, K]; top_logps: float [N, K], -inf in unused slots. Returns float32 [N], in
    nats, >= 0. Joining the tail into one bucket makes this a lower bound of the full KL, exact where K covers all mass.
    A KL over the K tokens alone would not be a divergence (it can be negative).
    """
    import torch

    full = logits.float()
    total = full.logsumexp(-1)
    logp = top_logps.float()
    used = logp > -torch.inf
    logq = torch.where(used, full.gather(-1, top_ids) - total[:, None], 0.0)
    p = torch.where(used, logp.exp(), 0.0)
    head = (p * (torch.where(used, logp, 0.0) - logq)).sum(-1)
    p_tail = (1.0 - p.sum(-1)).clamp(min=0.0)
    # The student's tail as the sum of what is not stored: 1 - sum(q) loses all digits, and its gradient, when q is sharp.
    # amax, because an unused slot carries id 0, which a used one may carry too
    stored = torch.zeros_like(full).scatter_reduce(-1, top_ids, used.to(full.dtype), "amax").bool()
    has_tail = (p_tail > 1e-6) & ~stored.all(-1)
    rest = full.masked_fill(stored, -torch.inf)
    rest = torch.where(has_tail[:, None], rest, 0.0)  # a row without a tail must not send NaN back from logsumexp(-inf)
    log_q_tail = torch.where(has_tail, rest.logsumexp(-1) - total, 0.0)
    tail = torch.where(has_tail, p_tail * (p_tail.clamp(min=1e-9).log() - log_q_tail), 0.0)
    return head + tail


def token_weights(
    weighting: Weighting,
    logp_theta: Tensor,
    logp_beta: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    block: int,
    clip_delta: tuple[float, float],
    clip_log: tuple[float, float],
    documents: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Weights w_t [B, T] without gradient, zero outside the mask, and statistics (see :func:`pear.weights`).

    logp_theta here is of the model that the ratio uses (live, or frozen), logp_beta of the data's policy; for `dft`
    only logp_theta is read, for `sft` neither.
    """
    import torch

    if weighting.startswith("pear_"):
        level: pear.Level = weighting.removeprefix("pear_")  # type: ignore[assignment]
        return pear.weights(
            logp_theta,
            logp_beta,
            mask,
            level,
            gamma=gamma,
            block=block,
            clip_delta=clip_delta,
            clip_log=clip_log,
            documents=documents,
        )
    with torch.no_grad():
        mask = mask.bool()
        if weighting == "sft":
            return mask.to(logp_theta.dtype), {}
        log_w = logp_theta if weighting == "dft" else (logp_theta - logp_beta).clamp(*clip_delta)
        w = torch.where(mask, log_w.exp(), 0.0)
        kept = w[mask]
        if not len(kept):
            return w, {}
        return w, {"weight_mean": kept.mean().item(), "weight_ess": (kept.sum() ** 2 / (kept**2).sum() / len(kept)).item()}


def negative_weights(logp_theta: Tensor, logp_beta: Tensor, mask: Tensor, strength: float) -> Tensor:
    """Weights for wrong traces (off by default; form not confirmed by the paper): -strength x clip(prod ratio, 0.01, 2).

    One document per row. logp_*: [B, T]; returns [B, T] without gradient.
    """
    import torch

    with torch.no_grad():
        ratio = torch.where(mask, logp_theta - logp_beta, 0.0).sum(1, keepdim=True).exp().clamp(0.01, 2.0)
        return torch.where(mask, -strength * ratio, 0.0)


def normalise(w: Tensor, mask: Tensor, norm: Norm) -> Tensor:
    """Fold the choice of normaliser into the weights. One document per row; w, mask: [B, T].

    tokens: unchanged, the caller divides by the response tokens of the global batch. self: the same after each
    document's weights were scaled to mean 1. per_sequence: each document's weights are divided by its length, and the
    caller divides by the number of documents.
    """
    import torch

    if norm == "tokens":
        return w
    count = mask.sum(1, keepdim=True).clamp(min=1)
    if norm == "self":
        total = w.sum(1, keepdim=True)
        return torch.where(total != 0, w * count / total, w)
    return w / count


def weighted_loss(per_token: Tensor, w: Tensor, mask: Tensor, count: Tensor | int) -> Tensor:
    """sum_t sg[w_t] l_t / count. per_token, w, mask: [B, T]; a batch without response tokens gives zero, not NaN."""
    import torch

    return (torch.where(mask, per_token, 0.0) * w.detach()).sum() / max(int(count), 1)
