"""Log-probabilities of given tokens: float32, without ever holding [tokens, vocabulary] in float32 at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, *, chunk: int = 4096, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`.

    logits: [..., V], any float dtype. tokens: [...], int64, on the same device. Returns float32 [...], in nats.
    Differentiable. Rows are taken `chunk` at a time and recomputed in the backward pass, so that the peak is
    chunk x V floats instead of all rows (the softmax of a 150k vocabulary is what runs out of memory first).
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    flat, index = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)

    def rows(part: Tensor, at: Tensor) -> Tensor:
        part = part.float() / temperature if temperature != 1.0 else part.float()
        return part.gather(-1, at[:, None])[:, 0] - part.logsumexp(-1)

    if flat.shape[0] <= chunk:
        return rows(flat, index).view(tokens.shape)
    pieces = [
        checkpoint(rows, a, b, use_reentrant=False) if flat.requires_grad else rows(a, b)
        for a, b in zip(flat.split(chunk), index.split(chunk), strict=True)
    ]
    return torch.cat(pieces).view(tokens.shape)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis, float32. Exact for -inf logits (0 log 0 = 0)."""
    logp = logits.float().log_softmax(-1)
    p = logp.exp()
    return -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)
