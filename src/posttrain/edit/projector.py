"""Projection onto the low-curvature subspace of kron(S, A), without ever forming it (arXiv 2602.15823, section 4).

With A = U_A L_A U_Aᵀ and S = U_S L_S U_Sᵀ the eigenvalues of the layer's curvature are l_ij = l^S_i l^A_j. The largest
ones that hold a share gamma of their sum are blocked; M_ij = 1 where l_ij is below all blocked ones, and

    Q_proj = U_S ((U_Sᵀ Q U_A) o M) U_Aᵀ.

The blocked (i, j) form a staircase in the corner of large eigenvalues, the free ones in the opposite corner. So either Q
minus its part in the blocked corner is computed or its part in the free one, whichever touches fewer eigenvectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from posttrain.core.errors import UserError
from posttrain.edit.kfac import Factors

if TYPE_CHECKING:
    from torch import Tensor

Subspace = Literal["kfac", "a_only", "random"]


def spectrum(matrix: Tensor, name: str = "factor") -> tuple[Tensor, Tensor]:
    """(eigenvalues descending [d], eigenvectors as columns [d, d]) of a symmetric matrix, float64.

    Eigenvalues that rounding made negative, or that are below d * eps * the largest (the usual rule for a numerical rank),
    become exactly 0, so that gamma = 1 leaves the null space free instead of its rounding noise.
    """
    import torch

    if not bool(torch.isfinite(matrix).all()):
        raise UserError(f"{name} is not finite; look for broken weights, or use dtype float32.")
    values, vectors = torch.linalg.eigh(matrix.double())
    values, vectors = values.flip(0), vectors.flip(1)
    floor = len(values) * torch.finfo(torch.float64).eps * values[0].clamp(min=0)
    return torch.where(values > floor, values, 0.0), vectors


def threshold(values: Tensor, gamma: float) -> float:
    """lambda* of the eigenvalues (float64, any shape and order): the k-th largest, k = min{r : sum of the r largest >= gamma * sum}.

    What is at or above lambda* is blocked, what is below stays free. gamma 0 blocks the largest one; gamma 1 blocks all
    that are not 0 (lambda* is then the smallest positive one). inf, which blocks nothing, if all are 0. Sums in float64:
    at gamma near 1 rounding in float32 would decide k (the card's pitfall).
    """
    if not 0 <= gamma <= 1:
        raise UserError(f"gamma = {gamma}: give a share between 0 and 1.")
    ordered = values.double().flatten().clamp(min=0).sort(descending=True).values
    total = ordered.cumsum(0)
    if not len(ordered) or total[-1] == 0:
        return math.inf
    if gamma == 1:
        return ordered[ordered > 0][-1].item()
    k = int((total / total[-1] < gamma).sum())  # the sums rise, so this is the first index that reaches gamma
    return ordered[k].item()


class Projector:
    """Projects [do, di] matrices of one layer. Pure: holds the eigenvectors of one corner, and which pairs in it count."""

    def __init__(self, rows: Tensor | None, columns: Tensor, pairs: Tensor, subtract: bool) -> None:
        """rows: some columns of U_S, [do, r] (None: all of them, which then need not be known); columns: some of U_A, [di, c];
        pairs: bool [r, c]; subtract: the pairs are blocked and their part is taken off, otherwise they are what is left."""
        self.rows, self.columns, self.subtract = rows, columns, subtract
        self.empty = not pairs.any()
        self.steps = [] if self.empty else [(r, c, pairs[r, c].to(columns.dtype)) for r, c in staircase(pairs, subtract)]

    def __call__(self, q: Tensor) -> Tensor:
        """Q_proj [do, di] in Q's dtype. Exactly Q if nothing is blocked and exactly 0 if everything is: rounding noise in place
        of 0 would be blown up to full steps by Adam."""
        import torch

        if self.empty:
            return q if self.subtract else q.new_zeros(q.shape)
        wide = q.to(self.columns.dtype)
        left = wide if self.rows is None else self.rows.T @ wide
        out = torch.empty_like(left)
        for r, c, pairs in self.steps:
            if self.rows is None:  # one row of pairs holds for all rows of Q
                out = (left @ self.columns[:, c]) * pairs @ self.columns[:, c].T
            else:
                torch.mm((left[r] @ self.columns[:, c]) * pairs, self.columns[:, c].T, out=out[r])
        part = out if self.rows is None else self.rows @ out
        return (wide - part if self.subtract else part).to(q.dtype)


def staircase(pairs: Tensor, from_first: bool) -> list[tuple[slice, slice]]:
    """Blocks (rows, columns) that hold every True of a staircase [r, c]: groups of 1, 1, 2, 4, ... rows, counted from the row
    with the most of them, each with its own columns. Products over the blocks cost about the area of the staircase, which is
    far below r * c: a few rows need most columns, most rows a few."""
    r, found, start, size = pairs.shape[0], [], 0, 1
    while start < r:
        stop = min(start + size, r)
        rows = slice(start, stop) if from_first else slice(r - stop, r - start)
        columns = pairs[rows].any(0).nonzero()
        found.append((rows, slice(int(columns[0]), int(columns[-1]) + 1)))
        size, start = max(size, start), stop
    return found


def corners(blocked: Tensor) -> tuple[slice, slice, bool]:
    """(rows, columns, subtract): the corner of blocked pairs, or of free ones if that is smaller. Spectra are descending."""
    do, di = blocked.shape
    r, c = int(blocked.any(1).sum()), int(blocked.any(0).sum())
    free_r, free_c = int((~blocked).any(1).sum()), int((~blocked).any(0).sum())
    if r + c <= free_r + free_c:
        return slice(0, r), slice(0, c), True
    return slice(do - free_r, do), slice(di - free_c, di), False


def orthonormal(dimension: int, count: int, seed: int, like: Tensor) -> Tensor:
    """`count` random orthonormal columns, uniformly distributed (QR of a Gaussian matrix with the signs fixed), float64."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(dimension, count, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).to(like.device)


def projectors(
    factors: Factors,
    gamma: float,
    *,
    subspace: Subspace = "kfac",
    energy: Literal["layer", "global"] = "layer",
    seed: int = 0,
    dtype=None,
) -> tuple[dict[str, Projector], dict[str, float]]:
    """({layer: projector}, {layer: share of directions that stay free}).

    energy: `layer` takes gamma's share of each layer's eigenvalues, `global` of those of all layers together.
    subspace: `kfac`; `a_only` blocks by A alone; `random` blocks as many directions as `kfac` in random orthogonal bases.
    dtype: of the eigenvectors and so of the product (default float32).
    """
    import torch

    dtype = dtype or torch.float32
    spectra = {}
    for name in factors.a:
        la, ua = spectrum(factors.a[name], f"A of {name}")
        ls, us = spectrum(factors.s[name], f"S of {name}") if subspace != "a_only" else (la.new_ones(1), None)
        spectra[name] = (la, ua, ls, us)
    products = {name: torch.outer(ls, la) for name, (la, _, ls, _) in spectra.items()}
    shared = threshold(torch.cat([p.flatten() for p in products.values()]), gamma) if energy == "global" else None
    found: dict[str, Projector] = {}
    free: dict[str, float] = {}
    for i, (name, (la, ua, _, us)) in enumerate(spectra.items()):
        blocked = products[name] >= (threshold(products[name], gamma) if shared is None else shared)
        free[name] = 1 - blocked.double().mean().item()
        rows, columns, subtract = corners(blocked)
        left, right = None if us is None else us[:, rows], ua[:, columns]
        if subspace == "random":
            left, right = (orthonormal(*u.shape, seed=seed * 1000003 + 2 * i + j, like=la) for j, u in enumerate((left, right)))
        pairs = blocked[rows, columns] if subtract else ~blocked[rows, columns]
        left = None if left is None else left.to(dtype).contiguous()
        found[name] = Projector(left, right.to(dtype).contiguous(), pairs, subtract)
    return found, free


class ProjectedOptimizer:
    """A torch optimiser whose steps are kept in the subspace.

    `grad` projects the gradient and then steps, as the paper does: with Adam, whose scaling is element by element, the
    step leaves the subspace again. `step` computes the optimiser's step from the raw gradient and projects the step, so the
    sum of all steps stays inside. `none` is the optimiser alone. With plain SGD `grad` and `step` are the same.

    The optimiser works on float32 copies (float64 for a float64 model) of the weights it is given, so that small steps are
    not rounded away in bfloat16; after each step the weights are those copies, rounded.
    """

    def __init__(self, weights: Mapping[str, Tensor], make, projectors: Mapping[str, Projector], mode: str) -> None:
        """weights: {layer: parameter}; make: list of tensors -> torch optimiser; projectors may be empty with mode `none`."""
        import torch

        self.weights, self.mode = dict(weights), mode
        self.projectors = dict(projectors)
        self.masters = {
            name: w.detach().to(torch.promote_types(w.dtype, torch.float32)).clone().requires_grad_(True)
            for name, w in self.weights.items()
        }
        self.reference = {name: m.detach().clone() for name, m in self.masters.items()}
        self.optimizer = make(list(self.masters.values()))
        self.seconds = 0.0  # spent on projecting

    def step(self) -> None:
        """One step from the gradients that lie on the weights, which are cleared."""
        import time

        import torch

        with torch.no_grad():
            for name, master in self.masters.items():
                grad = self.weights[name].grad
                master.grad = None if grad is None else grad.to(master.dtype)
                self.weights[name].grad = None
                if self.mode == "grad" and grad is not None:
                    began = time.perf_counter()
                    master.grad = self.projectors[name](master.grad)
                    self.seconds += time.perf_counter() - began
            before = {name: m.detach().clone() for name, m in self.masters.items()} if self.mode == "step" else {}
            self.optimizer.step()
            for name, master in self.masters.items():
                if self.mode == "step":
                    began = time.perf_counter()
                    master.copy_(before[name] + self.projectors[name](master - before[name]))
                    self.seconds += time.perf_counter() - began
                self.weights[name].copy_(master)

    def moved(self) -> float:
        """Largest ||W - W_ref||_F / ||W_ref||_F over the layers since the last refresh (the paper's criterion)."""
        return max(((m - self.reference[n]).norm() / self.reference[n].norm()).item() for n, m in self.masters.items())

    def refresh(self, projectors: Mapping[str, Projector]) -> None:
        """Take new projectors and project Adam's first moment with them (the second stays, as in the authors' code)."""
        import torch

        self.projectors = dict(projectors)
        with torch.no_grad():
            for name, master in self.masters.items():
                self.reference[name] = master.detach().clone()
                state = self.optimizer.state.get(master, {})
                if self.mode != "none" and "exp_avg" in state:
                    state["exp_avg"].copy_(self.projectors[name](state["exp_avg"]))
