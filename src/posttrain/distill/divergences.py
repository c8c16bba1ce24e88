"""Divergences between a teacher's and a student's next-token distributions, value and gradient in one pass over positions.

TAD (tail-aware distillation, arXiv 2602.20816, known to us through public notes; what they leave open is marked inferred):
KL(p^T || p^S) = KL1 + alpha^T KL2, where S is the set of the teacher's K largest probabilities at a position, alpha^T and
alpha^S are both models' masses outside S, KL1 is the KL of (p_i for i in S, alpha) and KL2 the KL of the renormalised tails.
L = KL1 + beta(X) alpha^T KL2 with beta(X) = beta / mean of alpha^T over the sequence's valid positions; it holds no gradient.

Gradients with respect to the student's logits are in closed form and are computed with the value, `chunk` positions at a
time: float32 [chunk, V] is all that exists besides the logits and their gradient, which backward would allocate anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from posttrain.core.config import Model, key

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["none", "kl", "rkl", "jsd", "skew_kl", "topk_only", "tail_only", "dkd", "tad"]
LARGEST_BETA = 1e3  # of beta(X), for nearly deterministic sequences (inferred)
ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}  # of a chunk, unless its positions are given: what a core's cache holds, 128 MB


class Divergence(Model):
    """Which divergence, and its constants. `none` is plain language modelling."""

    kind: Kind = key("tad", help="none, kl, rkl, jsd, skew_kl, topk_only, tail_only, dkd or tad")
    k: int = key(10, help="tad, topk_only, tail_only: size of the teacher's head; everything else is tail", ge=0)
    beta: float = key(2.0, help="tad: mean weight of KL2; kl is mean alpha^T of a sequence, not 1. dkd: weight of NCKD", ge=0)
    normalise: Literal["sequence", "constant"] = key("sequence", help="tad: beta / mean alpha^T of the row, or beta itself")
    mixture: float = key(0.5, help="jsd: weight b of the teacher; skew_kl: share of the teacher in the second argument", gt=0, lt=1)
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


class Columns:
    """Chunks of positions of a [..., V] tensor: valid positions alone, used columns alone, as a wide copy."""

    def __init__(self, tensor: Tensor, valid: Tensor | None, vocabulary: int | Tensor | None, temperature: float) -> None:
        import torch

        self.flat, self.valid, self.vocabulary, self.temperature = tensor.reshape(-1, tensor.shape[-1]), valid, vocabulary, temperature
        self.dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32

    def rows(self, part: slice) -> Any:
        return part if self.valid is None else self.valid[part]

    def read(self, part: slice) -> Tensor:
        found = self.flat[self.rows(part)]
        if self.vocabulary is not None:
            found = found[:, : self.vocabulary] if isinstance(self.vocabulary, int) else found[:, self.vocabulary]
        found = found.to(self.dtype, copy=self.valid is None)  # what follows works in place; an index has made a copy
        return found.div_(self.temperature) if self.temperature != 1.0 else found

    def write(self, part: slice, values: Tensor) -> None:
        rows, columns = self.rows(part), self.vocabulary
        values = values.to(self.flat.dtype)
        if columns is None:
            self.flat[rows] = values
        elif isinstance(columns, int):
            self.flat[rows, :columns] = values
        elif isinstance(rows, slice):
            self.flat[rows, columns] = values
        else:
            self.flat[rows[:, None], columns[None]] = values


def beta_of(alpha: Tensor, row: Tensor, count: int, beta: float) -> Tensor:
    """beta(X) of each of `count` rows [count]: beta / mean alpha^T over the row's positions, at most LARGEST_BETA.

    alpha, row: [n] of valid positions, mass and number of the row. A row without a position has the value of mean alpha 0.
    """
    import torch

    sums = torch.zeros(count, dtype=alpha.dtype, device=alpha.device).index_add_(0, row, alpha)
    number = torch.zeros_like(sums).index_add_(0, row, torch.ones_like(alpha)).clamp(min=1)
    return (beta / (sums / number).clamp(min=torch.finfo(alpha.dtype).tiny)).clamp(max=LARGEST_BETA)


def loss(
    teacher: Tensor,
    student: Tensor,
    mask: Tensor,
    divergence: Divergence,
    *,
    labels: Tensor | None = None,
    vocabulary: int | Tensor | None = None,
    chunk: int | None = None,
    stats: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss of each position [B, T] in nats, 0 outside the mask; statistics).

    teacher, student: logits [B, T, V] of any float dtype, finite, the student's at position t and the teacher's for the same
    next token. mask: bool [B, T]. labels: int64 [B, T], the next tokens (dkd with target label). vocabulary: number of leading
    columns in use, or their indices int64; the others have no part in either model and get no gradient. Computed in float32,
    in float64 for float64 students. Differentiable once, in the student alone. A sequence is a row, also where it is packed.
    stats: per valid position [n] kl1, kl2, alpha_t, alpha_s (kinds with a head), grad_norm of the loss in the logits, tail_share
    of its square; beta_x [B] (tad), always. Raises ValueError for shapes that do not fit.
    """
    import torch

    used = vocabulary if isinstance(vocabulary, int) else student.shape[-1] if vocabulary is None else len(vocabulary)
    if teacher.shape[:-1] != student.shape[:-1] or (vocabulary is None and teacher.shape != student.shape):
        raise ValueError(f"logits {tuple(teacher.shape)} of the teacher do not fit {tuple(student.shape)} of the student")
    if divergence.kind == "dkd" and divergence.target == "label" and labels is None:
        raise ValueError("dkd with target label needs labels")
    width, found, wanted = mask.shape[-1], {}, student.requires_grad and torch.is_grad_enabled()
    if divergence.kind == "none":
        return torch.zeros(mask.shape, device=student.device), found
    with torch.no_grad():
        valid = None if bool(mask.all()) else mask.reshape(-1).nonzero()[:, 0]
        count = mask.numel() if valid is None else len(valid)
        row = (torch.arange(count, device=student.device) if valid is None else valid) // max(width, 1)
        size = chunk or max(1, ELEMENTS.get(student.device.type, 1 << 18) // used)
        parts = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        t, s = (Columns(x.detach(), valid, vocabulary, divergence.temperature) for x in (teacher, student))
        heads = _heads(t, parts, divergence, used, None if labels is None else labels.reshape(-1))
        weight = None
        if divergence.kind == "tad":
            alpha = torch.cat([h.log_tail for h in heads]).exp() if heads else torch.zeros(0, device=student.device)
            per_row = beta_of(alpha, row, len(mask), divergence.beta)
            if divergence.normalise == "constant":
                per_row = torch.full_like(per_row, divergence.beta)
            found["beta_x"], weight = per_row, per_row[row]
        values = torch.zeros(mask.numel(), dtype=s.dtype, device=student.device)
        gradient = torch.zeros_like(s.flat) if wanted else None
        into = Columns(gradient, valid, vocabulary, 1.0) if gradient is not None else None
        numbers: list[dict[str, Tensor]] = []
        for i, part in enumerate(parts):
            head = heads[i] if heads else None
            value, grad, more = _chunk(t.read(part), s.read(part), head, divergence, None if weight is None else weight[part])
            values[s.rows(part)] = value
            if divergence.temperature != 1.0:
                grad.div_(divergence.temperature)
            if stats:
                numbers.append(more | _energy(grad, head))
            if into:
                into.write(part, grad)
        found |= {name: torch.cat([one[name] for one in numbers]) for name in numbers[0]} if numbers else {}
    result = values if not wanted else _apply(student.reshape(s.flat.shape), values, gradient, size)
    return result.view(mask.shape), found


def _heads(t: Columns, parts: list[slice], divergence: Divergence, used: int, labels: Tensor | None) -> list[Head]:
    """Of each chunk of the teacher. A head of all columns is one of all but the last: their tails have no shape either way."""
    import torch

    found = []
    for part in parts if divergence.head or divergence.kind in ("tad", "tail_only") else ():
        logits = t.read(part)
        if divergence.kind == "dkd":
            at = labels[t.rows(part)] if divergence.target == "label" else logits.argmax(-1)
            if torch.is_tensor(t.vocabulary) and divergence.target == "label":
                at = torch.searchsorted(t.vocabulary, at)
            index = at[:, None]
        else:
            index = logits.topk(min(divergence.head, used - 1), -1, sorted=False).indices
        found.append(split(logits, index))
    return found


def _chunk(
    t: Tensor, s: Tensor, head: Head | None, divergence: Divergence, weight: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(value [n], gradient in s [n, V], numbers) of wide logits [n, V], which are used up."""
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
        v = ls.sub_(lt)
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
    lt, ls = t.gather(-1, head.index).log_softmax(-1), s.gather(-1, head.index).log_softmax(-1)
    own = split(s, head.index)
    value = (lt.exp() * (lt - ls)).sum(-1)
    gradient = s.zero_().scatter_(-1, head.index, ls.exp() - lt.exp())
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


def _energy(gradient: Tensor, head: Head | None) -> dict[str, Tensor]:
    """Norm of a position's gradient, and the share of its square on the tail [n]; the share of a zero gradient is 0."""
    whole = gradient.square().sum(-1)
    if head is None:
        return {"grad_norm": whole.sqrt()}
    tail = (whole - gradient.gather(-1, head.index).square().sum(-1)).clamp(min=0.0)
    return {"grad_norm": whole.sqrt(), "tail_share": (tail / whole.clamp(min=1e-30)).clamp(max=1.0)}


def _apply(student: Tensor, values: Tensor, gradient: Tensor, size: int) -> Tensor:
    """`values` [N] as a function of the logits [N, V], whose gradient is already known."""
    import torch

    class Known(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, values):
            ctx.gradient = gradient
            return values.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, upstream):
            found, ctx.gradient = ctx.gradient, None
            if found is None:
                raise RuntimeError("the gradient of a divergence can be taken once; compute the loss again")
            for part, scale in zip(found.split(size), upstream.split(size), strict=True):
                part.copy_(part.to(scale.dtype) * scale[:, None])  # rounded once, also in bfloat16
            return found, None

    return Known.apply(student, values)
