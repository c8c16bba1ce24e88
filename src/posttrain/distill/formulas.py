"""Divergences of one chunk of positions: value and gradient in closed form, on wide logits [n, V].

TAD (tail-aware distillation, arXiv 2602.20816, known to us through public notes; what they leave open is marked inferred):
KL(p^T || p^S) = KL1 + alpha^T KL2, where S is the set of the teacher's K largest probabilities at a position, alpha^T and
alpha^S are both models' masses outside S, KL1 is the KL of (p_i for i in S, alpha) and KL2 the KL of the renormalised tails.
L = KL1 + beta(X) alpha^T KL2 with beta(X) = beta / mean of alpha^T over the sequence's valid positions; it holds no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from posttrain.core.config import Model, key

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["none", "kl", "rkl", "jsd", "skew_kl", "topk_only", "tail_only", "dkd", "tad"]


class Divergence(Model):
    """Which divergence, and its constants. `none` is plain language modelling."""

    kind: Kind = key("tad", help="none, kl, rkl, jsd, skew_kl, topk_only, tail_only, dkd or tad")
    k: int = key(10, help="tad, topk_only, tail_only: size of the teacher's head; everything else is tail", ge=0)
    beta: float = key(2.0, help="tad: mean weight of KL2; kl is mean alpha^T of a sequence, not 1. dkd: weight of NCKD", ge=0)
    normalise: Literal["sequence", "constant"] = key("sequence", help="tad: beta / mean alpha^T of the row, or beta itself")
    mixture: float = key(
        0.5, help="jsd: weight b of the teacher; skew_kl: share of the teacher in the second argument", gt=0, lt=1
    )
    target: Literal["label", "teacher_argmax"] = key("label", help="dkd: which token is the target class")
    alpha: float = key(1.0, help="dkd: weight of TCKD", ge=0)
    temperature: float = key(1.0, help="both logits are divided by it; the loss is not multiplied by its square", gt=0)

    @property
    def head(self) -> int:
        """Tokens that are looked up by their index."""
        return {"dkd": 1, "tad": self.k, "topk_only": self.k, "tail_only": self.k}.get(self.kind, 0)

    def model_post_init(self, _context: Any) -> None:
        if self.kind == "topk_only" and self.k < 1:
            raise ValueError("kind: topk_only needs k of at least 1")


class Head(NamedTuple):
    """A chunk's head: index [n, K] int64, log-sum-exp of all logits [n], log of the mass outside the head [n] (-inf: none)."""

    index: Tensor
    total: Tensor
    log_tail: Tensor


def split(logits: Tensor, index: Tensor) -> Head:
    """Total and tail of `logits` [n, V] for the head `index` [n, K]. Leaves them as they were.

    The tail is summed by itself: 1 - sum of the head has no correct digit where the head is nearly all.
    """
    import torch

    kept = logits.gather(-1, index)
    if not index.shape[-1]:
        total = logits.logsumexp(-1)
        return Head(index, total, torch.zeros_like(total))
    logits.scatter_(-1, index, -torch.inf)
    rest = logits.logsumexp(-1)
    logits.scatter_(-1, index, kept)
    total = torch.logaddexp(rest, kept.logsumexp(-1))
    return Head(index, total, rest - total)


def formula(
    t: Tensor, s: Tensor, head: Head | None, divergence: Divergence, weight: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(value [n], gradient in s [n, V], numbers) of wide logits [n, V]. `s` becomes the student's log-probabilities."""
    kind = divergence.kind
    if kind == "topk_only":
        return _top(t, s, head)
    if head is not None:
        return _parts(t, s, head, divergence, weight)
    lt, ls = t.sub_(t.logsumexp(-1, keepdim=True)), s.sub_(s.logsumexp(-1, keepdim=True))
    pt, ps = lt.exp(), ls.exp()
    if kind == "kl":
        return (lt.sub_(ls).mul_(pt)).sum(-1), ps.sub_(pt), {}
    return *_mixed(lt, ls, pt, ps, divergence), {}


def _mixed(lt: Tensor, ls: Tensor, pt: Tensor, ps: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Reverse KL, GKD's JSD_b = b KL(t || m) + (1 - b) KL(s || m) with m = b t + (1 - b) s, and KL(t || a t + (1 - a) s).

    Each gradient is s (v - sum s v) with v the derivative in the student's probabilities, up to a constant.
    """
    import math

    import torch

    if divergence.kind == "rkl":
        v = ls - lt
        value = (ps * v).sum(-1)
        return value, v.sub_(value[:, None]).mul_(ps)
    b = divergence.mixture
    mean = torch.logaddexp(lt + math.log(b), ls + math.log1p(-b))
    if divergence.kind == "jsd":
        v = (ls - mean).mul_(1 - b)
        value = b * (pt * (lt - mean)).sum(-1) + (ps * v).sum(-1)
    else:
        value, v = (pt * (lt - mean)).sum(-1), (lt - mean).exp_().mul_(b - 1)
    return value, ps * (v - (ps * v).sum(-1, keepdim=True))


def _top(t: Tensor, s: Tensor, head: Head) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """KL of both models' distributions renormalised over the teacher's top K: what ignoring the tail is."""
    import torch

    lt, ls = t.gather(-1, head.index).log_softmax(-1), s.gather(-1, head.index).log_softmax(-1)
    own = split(s, head.index)
    value = (lt.exp() * (lt - ls)).sum(-1)
    gradient = torch.zeros_like(s).scatter_(-1, head.index, ls.exp() - lt.exp())
    s.sub_(own.total[:, None])
    return value, gradient, {"alpha_t": head.log_tail.exp(), "alpha_s": own.log_tail.exp()}


def _parts(
    t: Tensor, s: Tensor, head: Head, divergence: Divergence, weight: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """c KL1 + w KL2 with c = 1, w = beta(X) alpha^T (tad), c = alpha, w = beta (dkd) or c = 0, w = 1 (tail_only).

    Its gradient is c (p^S - p^T) in the head and p^S (c + (w - c alpha^T) / alpha^S) - p^T w / alpha^T in the tail, so that
    the two probabilities are scaled per position and nothing of size V is computed that KL does not need.
    """
    import torch

    own = split(s, head.index)
    lt, ls = t.sub_(head.total[:, None]), s.sub_(own.total[:, None])
    pt, ps = lt.exp(), ls.exp()
    each = lt.sub_(ls).mul_(pt)
    top = each.gather(-1, head.index).sum(-1)
    tail = each.scatter_(-1, head.index, 0.0).sum(-1)
    alpha, gap = head.log_tail.exp(), head.log_tail - own.log_tail
    kl1 = top + alpha * gap
    scaled = (tail - alpha * gap).clamp(min=0.0)  # alpha^T KL2: each term holds p^T, so alpha^T -> 0 gives 0
    tiny = torch.finfo(alpha.dtype).tiny
    kl2 = torch.where(alpha > tiny, scaled / alpha.clamp(min=tiny), 0.0)
    if t.shape[-1] - head.index.shape[-1] <= 1:  # one token has no shape; rounding must not give it one
        scaled, kl2 = torch.zeros_like(scaled), torch.zeros_like(kl2)
        weight = None if weight is None else torch.ones_like(weight)
    if divergence.kind == "tad":
        ratio = gap.clamp(max=80.0).exp()  # a student with no tail at all must not give 0 x infinity
        c, value, on_s, on_t = 1.0, kl1 + weight * scaled, 1 + (weight - 1) * ratio, weight
    else:
        c, w = (divergence.alpha, divergence.beta) if divergence.kind == "dkd" else (0.0, 1.0)
        value = c * kl1 + w * kl2
        on_s = c + (w - c * alpha) * (-own.log_tail).clamp(max=80.0).exp()
        on_t = w * (-head.log_tail).clamp(max=80.0).exp()
    top_gradient = c * (ps.gather(-1, head.index) - pt.gather(-1, head.index))
    gradient = ps.mul_(on_s[:, None]).sub_(pt.mul_(on_t[:, None])).scatter_(-1, head.index, top_gradient)
    numbers = {"kl1": kl1, "kl2": kl2, "alpha_t": alpha, "alpha_s": own.log_tail.exp()}
    return value, gradient, numbers


def energy(gradient: Tensor, head: Head | None) -> dict[str, Tensor]:
    """Norm of a position's gradient, and the share of its square on the tail [n]; the share of a zero gradient is 0."""
    whole = gradient.square().sum(-1)
    if head is None:
        return {"grad_norm": whole.sqrt()}
    tail = (whole - gradient.gather(-1, head.index).square().sum(-1)).clamp(min=0.0)
    return {"grad_norm": whole.sqrt(), "tail_share": (tail / whole.clamp(min=1e-30)).clamp(max=1.0)}


def cross_entropy(log_probs: Tensor, grad: Tensor, at: Tensor, weight: float, temperature: float) -> Tensor:
    """-log p of `at` [n] at temperature 1 from the student's log-probabilities; adds `weight` times its gradient to `grad`."""
    import torch

    if temperature != 1.0:
        log_probs = (log_probs * temperature).log_softmax(-1)
    value = -log_probs.gather(-1, at[:, None])[:, 0]
    if weight:
        grad.add_(log_probs.exp_(), alpha=weight)
        grad.scatter_add_(-1, at[:, None], torch.full_like(value, -weight)[:, None])
    return value
