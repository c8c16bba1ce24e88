"""A divergence between a teacher's and a student's logits over a batch, as a differentiable loss per position.

Formulas give value and gradient of a chunk of positions (:mod:`posttrain.distill.formulas`), so that float32 [chunk, V] is all
that exists besides the logits and their gradient, which backward would allocate anyway. The teacher is read twice for TAD:
beta(X) needs its tail mass at every position of a sequence first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from posttrain.distill.formulas import Divergence, Head, cross_entropy, energy, formula, split

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_BETA = 1e3  # of beta(X), for nearly deterministic sequences (inferred)
ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}  # of a chunk, unless its positions are given: what a core's cache holds, 128 MB


class Columns:
    """Chunks of positions of a [..., V] tensor: valid positions alone, used columns alone, as a wide copy."""

    def __init__(self, tensor: Tensor, valid: Tensor | None, vocabulary: int | Tensor | None, temperature: float, dtype: Any):
        self.flat, self.valid, self.dtype = tensor.reshape(-1, tensor.shape[-1]), valid, dtype
        self.vocabulary, self.temperature = vocabulary, temperature

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


def beta_of(alpha: Tensor, row: Tensor, count: int, divergence: Divergence) -> Tensor:
    """beta(X) of each of `count` rows [count]: beta / mean alpha^T over the row's positions, at most LARGEST_BETA; or beta.

    alpha, row: [n] of valid positions, mass and number of the row. A row without a position has the value of mean alpha 0.
    """
    import torch

    sums = torch.zeros(count, dtype=alpha.dtype, device=alpha.device)
    if divergence.normalise == "constant":
        return sums + divergence.beta
    number = torch.zeros_like(sums).index_add_(0, row, torch.ones_like(alpha)).clamp(min=1)
    mean = sums.index_add_(0, row, alpha) / number
    return (divergence.beta / mean.clamp(min=torch.finfo(alpha.dtype).tiny)).clamp(max=LARGEST_BETA)


def loss(
    teacher: Tensor | None,
    student: Tensor,
    mask: Tensor,
    divergence: Divergence,
    *,
    labels: Tensor | None = None,
    weight: float = 1.0,
    ce_weight: float = 0.0,
    vocabulary: int | Tensor | None = None,
    chunk: int | None = None,
    stats: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(weight x divergence + ce_weight x cross-entropy of each position [B, T] in nats, 0 outside the mask; statistics).

    teacher, student: logits [B, T, V] of any float dtype, finite, both for the same next token; teacher may be None for kind
    none. mask: bool [B, T]. labels: int64 [B, T], the next tokens (cross-entropy, at temperature 1, and dkd with target label).
    vocabulary: number of leading columns in use, or their rising indices int64; the others have no part in either model and get
    no gradient. Computed in float32, in float64 for float64 students. Differentiable once, in the student alone. A sequence is a
    row, also where it is packed (inferred). Statistics of valid positions [n]: divergence, ce; with `stats` as well kl1, kl2,
    alpha_t, alpha_s (kinds with a tail), grad_norm of weight x divergence in the logits and tail_share of its square; and beta_x [B]
    (tad). Raises ValueError for shapes that do not fit and for labels that are missing.
    """
    import torch

    plain, width = divergence.kind == "none", mask.shape[-1]
    used = vocabulary if isinstance(vocabulary, int) else student.shape[-1] if vocabulary is None else len(vocabulary)
    if not plain and (teacher.shape[:-1] != student.shape[:-1] or (vocabulary is None and teacher.shape != student.shape)):
        raise ValueError(f"logits {tuple(teacher.shape)} of the teacher do not fit {tuple(student.shape)} of the student")
    if labels is None and (ce_weight or (divergence.kind == "dkd" and divergence.target == "label")):
        raise ValueError("cross-entropy, and dkd with target label, need labels")
    wanted = student.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        valid = None if bool(mask.all()) else mask.reshape(-1).nonzero()[:, 0]
        count = mask.numel() if valid is None else len(valid)
        size = chunk or max(1, ELEMENTS.get(student.device.type, ELEMENTS["cpu"]) // used)
        parts = [slice(at, min(at + size, count)) for at in range(0, count, size)]
        wide = torch.float64 if student.dtype == torch.float64 else torch.float32
        s = Columns(student.detach(), valid, vocabulary, divergence.temperature, wide)
        t = s if plain else Columns(teacher.detach(), valid, vocabulary, divergence.temperature, wide)
        at = None if labels is None else _columns_of(labels, s)
        heads = _heads(t, parts, divergence, used, at)
        numbers: list[dict[str, Tensor]] = []
        found: dict[str, Tensor] = {}
        betas = None
        if divergence.kind == "tad":
            row = (torch.arange(count, device=student.device) if valid is None else valid) // max(width, 1)
            alpha = torch.cat([h.log_tail for h in heads]).exp() if heads else torch.zeros(0, device=student.device)
            found["beta_x"] = beta_of(alpha, row, len(mask), divergence)
            betas = found["beta_x"][row]
        values = torch.zeros(mask.numel(), dtype=wide, device=student.device)
        gradient = torch.zeros_like(s.flat) if wanted else None
        into = Columns(gradient, valid, vocabulary, 1.0, wide) if wanted else None
        for i, part in enumerate(parts):
            own = s.read(part)
            if plain:
                value, grad, more = own.new_zeros(len(own)), torch.zeros_like(own), {}
                own.sub_(own.logsumexp(-1, keepdim=True))
            else:
                value, grad, more = formula(
                    t.read(part), own, heads[i] if heads else None, divergence, None if betas is None else betas[part]
                )
            grad.mul_(weight / divergence.temperature)
            one = {"divergence": value}
            if stats and not plain:
                one |= more | energy(grad, heads[i] if heads else None)
            value = weight * value
            if at is not None:
                one["ce"] = cross_entropy(own, grad, at[part], ce_weight, divergence.temperature)
                value = value + ce_weight * one["ce"]
            values[s.rows(part)] = value
            numbers.append(one)
            if into:
                into.write(part, grad)
        found |= {name: torch.cat([one[name] for one in numbers]) for name in numbers[0]} if numbers else {}
    result = _known().apply(student.reshape(s.flat.shape), values, gradient, size) if wanted else values
    return result.view(mask.shape), found


def _columns_of(labels: Tensor, s: Columns) -> Tensor:
    """Labels of the valid positions [n], as places among the columns in use."""
    import torch

    at = labels.reshape(-1) if s.valid is None else labels.reshape(-1)[s.valid]
    return torch.searchsorted(s.vocabulary, at) if torch.is_tensor(s.vocabulary) else at


def _heads(t: Columns, parts: list[slice], divergence: Divergence, used: int, at: Tensor | None) -> list[Head]:
    """Of each chunk of the teacher. A head of all columns is one of all but the last: their tails have no shape either way. Where
    the tail is left out, all columns are all."""
    found = []
    for part in parts if divergence.head or divergence.kind in ("tad", "tail_only") else ():
        logits = t.read(part)
        if divergence.kind == "dkd":
            index = (at[part] if divergence.target == "label" else logits.argmax(-1))[:, None]
        else:
            most = used if divergence.kind == "topk_only" else used - 1
            index = logits.topk(min(divergence.head, most), -1, sorted=False).indices
        found.append(split(logits, index))
    return found


@functools.cache
def _known() -> Any:
    import torch

    class Known(torch.autograd.Function):
        """Values [N] as a function of logits [N, V] whose gradient is already there. Made once: a class made per call would keep
        its gradient until the garbage collector comes."""

        @staticmethod
        def forward(ctx, logits, values, gradient, size):
            ctx.gradient, ctx.size = gradient, size
            return values.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, upstream):
            found, ctx.gradient = ctx.gradient, None
            if found is None:
                raise RuntimeError("the gradient of a divergence can be taken once; compute the loss again")
            for part, scale in zip(found.split(ctx.size), upstream.split(ctx.size), strict=True):
                part.copy_(part.to(scale.dtype) * scale[:, None])  # in bfloat16 rounded here and when it was stored
            return found, None, None, None

    return Known
