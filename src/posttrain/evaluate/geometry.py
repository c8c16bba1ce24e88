"""Geometry of weights and representations between two checkpoints (arXiv 2603.17074, eq 1 to 3, and linear CKA).

Weight metrics take one tensor at a time, in chunks, and compute in float64: in float32 a relative change of exactly 0.5 %, of
which bf16 has many, would fall below 0.5 %. Sums of several tensors are `Change`s (or `Angle`s) added up, so what a total
covers is decided by the caller and can be listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from posttrain.core.effects import Effects, average, main_effects
from posttrain.core.errors import UserError
from posttrain.core.weights import interpolate, landscape

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = [  # the paper's other arithmetic lies in core, because other stages and the report need it too
    "Angle",
    "Change",
    "Component",
    "Effects",
    "angle",
    "average",
    "change",
    "cka",
    "component",
    "interpolate",
    "landscape",
    "main_effects",
    "pooled",
]

THRESHOLDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.10)
NEAR_ZERO = 1e-12
CHUNK = 2**22
Component = Literal["embedding", "attention", "mlp", "ssm", "norm", "head", "other"]
_PATTERNS: tuple[tuple[Component, str], ...] = (  # the first that is found decides: a norm inside attention is a norm
    ("norm", r"norm|(^|\.)ln_"),
    ("head", r"lm_head|embed_out"),
    ("embedding", r"embed|wte|wpe"),
    ("ssm", r"mamba|ssm|conv1d|A_log|dt_bias|\.D$|mixer\.(in|out)_proj"),
    ("attention", r"attn|attention|\.[qkvo]_proj\."),
    ("mlp", r"mlp|moe|expert|feed_forward|\.(gate|up|down)_proj\."),
)


def component(name: str) -> Component:
    """Which part of the model a tensor belongs to, by its name. A tied embedding is an embedding."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name)), "other")


# --- weights --------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Sums over the elements of one or more tensors, from W_old to W_new. Added up with :meth:`plus`."""

    elements: int = 0
    near_zero: int = 0
    """elements with |w_old| < 1e-12, which have no relative change and take no part in `below`"""
    identical: int = 0
    """elements that are equal, near zero or not"""
    below: tuple[int, ...] = (0,) * len(THRESHOLDS)
    """per threshold: elements with |w_new - w_old| / |w_old| below it"""
    moved: float = 0.0
    """||W_new - W_old||_F^2"""
    size: float = 0.0
    """||W_old||_F^2"""

    def plus(self, other: Change) -> Change:
        below = tuple(x + y for x, y in zip(self.below, other.below, strict=True))
        sums = {n: getattr(self, n) + getattr(other, n) for n in ("elements", "near_zero", "identical", "moved", "size")}
        return Change(below=below, **sums)

    @property
    def divergence(self) -> float | None:
        """delta = ||W_new - W_old||_F / ||W_old||_F (eq 1); None if W_old is zero."""
        return math.sqrt(self.moved / self.size) if self.size else None

    def unchanged(self) -> dict[str, float | None]:
        """Share of the elements with |w_old| >= 1e-12 whose relative change is below each threshold, by its name in percent.

        None where no element has a relative change.
        """
        regular = self.elements - self.near_zero
        return {
            f"unchanged_{100 * t:g}pct": n / regular if regular else None for t, n in zip(THRESHOLDS, self.below, strict=True)
        }


def change(old: Tensor, new: Tensor) -> Change:
    """From W_old to W_new, of one shape and any float dtype. Needs memory for a chunk of 4M elements."""
    total = Change()
    for a, b in zip(old.flatten().split(CHUNK), new.flatten().split(CHUNK), strict=True):
        a, b = a.double(), b.double()
        gap = b - a
        regular = a.abs() >= NEAR_ZERO
        relative = (gap[regular] / a[regular]).abs()
        part = Change(
            elements=a.numel(),
            near_zero=a.numel() - int(regular.sum()),
            identical=int((gap == 0).sum()),
            below=tuple(int((relative < t).sum()) for t in THRESHOLDS),
            moved=gap.square().sum().item(),
            size=a.square().sum().item(),
        )
        total = total.plus(part)
    return total


class Angle(NamedTuple):
    """Inner products of two directions of change, summed over elements of one or more tensors."""

    dot: float = 0.0
    first: float = 0.0
    second: float = 0.0

    def plus(self, other: Angle) -> Angle:
        return Angle(*(x + y for x, y in zip(self, other, strict=True)))

    @property
    def cosine(self) -> float | None:
        """cos(W_a - W_base, W_b - W_base) (eq 2); None if one of them did not move."""
        return self.dot / math.sqrt(self.first) / math.sqrt(self.second) if self.first and self.second else None


def angle(base: Tensor, a: Tensor, b: Tensor) -> Angle:
    """Of W_a - W_base and W_b - W_base, tensors of one shape and any float dtype."""
    total = Angle()
    for start, one, two in zip(*(w.flatten().split(CHUNK) for w in (base, a, b)), strict=True):
        first, second = one.double() - start.double(), two.double() - start.double()
        part = Angle((first * second).sum().item(), first.square().sum().item(), second.square().sum().item())
        total = total.plus(part)
    return total


# --- representations ------------------------------------------------------------------------------------------


def cka(x: np.ndarray, y: np.ndarray, *, centred: bool = True) -> float:
    """Linear CKA ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of x [n, d] and y [n, e], in float64; in [0, 1].

    Columns are centred first (Kornblith et al. 2019, arXiv 1905.00414). The formula as printed in arXiv 2603.17074 has no
    centring; it is near 1 for any two language models, whose mean vector dominates: `centred=False` is a diagnostic only.
    Even centred, it is biased upwards unless n is well above d. Raises :class:`UserError` if x or y is zero (centred: constant).
    """
    x, y = (np.asarray(values, dtype=np.float64) for values in (x, y))
    if centred:
        x, y = (values - values.mean(0) for values in (x, y))
    norms = [np.linalg.norm(values.T @ values) for values in (x, y)]
    if not all(norms):
        raise UserError("CKA of hidden states that do not vary over the texts is undefined; take more and different texts.")
    return float(np.linalg.norm(y.T @ x) ** 2 / (norms[0] * norms[1]))


def pooled(model: PreTrainedModel, texts: Sequence[Sequence[int]], batch: int = 1) -> np.ndarray:
    """Hidden states averaged over each text's tokens, float64 [layers + 1, n, d], for texts given as token ids.

    Layer 0 is the embedding, the last one is after the final norm (Transformers' `hidden_states`). batch = 1 is the paper's
    one text per forward pass; more are padded on the right and masked, which gives the same within rounding. Raises
    :class:`UserError` on a text without tokens.
    """
    import torch

    if not all(len(text) for text in texts):
        raise UserError("a text for CKA has no tokens; remove empty documents from the corpus.")
    model.eval()
    found = []
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        width = max(map(len, part))
        ids = torch.zeros((len(part), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(part):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        with torch.inference_mode():
            states = model.base_model(
                input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
            ).hidden_states
            real = mask.bool()[:, :, None]
            # where(), not a product: padding may hold anything, also NaN
            means = [torch.where(real, s.double(), 0.0).sum(1) / mask.sum(1, keepdim=True) for s in states]
        found.append(torch.stack(means).cpu())
    return torch.cat(found, dim=1).numpy()
