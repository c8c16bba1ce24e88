"""Directed influence between train-units, measured by one-step lookahead on losses.

The paper's body was not readable; every formula here is our reconstruction of D3 (paper card d3, Method, steps 1, 2, 5 and 8).
A[i, j] is how much a virtual optimizer step on unit i lowers the loss of unit j (nats per token, > 0: i helps j), and
D[i, j] = A[i, j] - A[j, i] > 0 says that i should come before j. Nothing of the training changes: parameters, buffers,
gradients, optimizer state, random state and train/eval mode are bit for bit what they were.

Several models with the same shapes can be probed at once: their parameters are stacked along a first axis of length R and
losses come as [R, ...], independent between replicates. A single model has R = 1.

First-order terms cancel in D only if a unit's gradient and its loss come from the same rows. Rows of the train half and of the
probe half differ, so D also holds eta (g_i - g_j) . noise, which no number of probe rows removes. Each of the M micro-batches
therefore has gradient rows of its own, and the standard error over micro-batches covers both halves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from posttrain.core.errors import UserError

if TYPE_CHECKING:
    import torch

Edge = Literal["raw_fd", "rel_loss", "unit_step", "pair_exact"]
EDGES: tuple[str, ...] = get_args(Edge)
MOST_PAIRS = 8
"""Largest number of units for `pair_exact`, which takes K (K - 1) lookaheads of two steps."""


class Influence(NamedTuple):
    """Means over M micro-batches, float64; a unit with a loss or gradient that is not finite has nan in its row and column."""

    A: np.ndarray  # [R, K, K], nats per token (rel_loss: share of the loss)
    D: np.ndarray  # [R, K, K], A - A', antisymmetric
    se: np.ndarray  # [R, K, K], standard error of A over micro-batches; nan if M = 1
    se_D: np.ndarray  # [R, K, K], standard error of D
    losses: np.ndarray  # [R, K], before the step, nats per token


def preconditioner(optimizer: Any, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """1 / (sqrt(v_hat) + eps) per parameter from Adam's second moment; None before the first step.

    v_hat is bias-corrected. Momentum and weight decay are left out: they add the same step whatever the unit. Raises UserError
    for an optimizer that keeps state, but no second moment.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    groups = {id(p): group for group in inner.param_groups for p in group["params"]}
    if not any(inner.state.get(p) for p in parameters):
        return None
    found = []
    for p in parameters:
        state, group = inner.state.get(p, {}), groups.get(id(p))
        if group is None or "exp_avg_sq" not in state:
            raise UserError(
                f"{type(inner).__name__} keeps no second moment of every parameter; use torch's AdamW, or precondition: false."
            )
        corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
        found.append(1 / (corrected.sqrt() + group["eps"]))
    return found


@contextlib.contextmanager
def untouched(parameters: Sequence[torch.Tensor], module: torch.nn.Module | None = None) -> Iterator[Callable[[], None]]:
    """Evaluation mode inside; afterwards parameters, buffers, modes and random states are bit for bit the old ones.

    Yields a function that puts the parameters back, to be called between virtual steps.
    """
    import torch

    kept = [p.detach().clone() for p in parameters]
    buffers = [(b, b.detach().clone()) for b in module.buffers()] if module is not None else []
    modes = [(m, m.training) for m in module.modules()] if module is not None else []
    cpu = torch.random.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None

    def back() -> None:
        with torch.no_grad():
            for p, old in zip(parameters, kept, strict=True):
                p.copy_(old)

    try:
        if module is not None:
            module.eval()
        yield back
    finally:
        back()
        with torch.no_grad():
            for b, old in buffers:
                b.copy_(old)
        for m, mode in modes:
            m.training = mode
        torch.random.set_rng_state(cpu)
        if cards is not None:
            torch.cuda.set_rng_state_all(cards)


def directions(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], scale: Sequence[torch.Tensor] | None, unit_norm: bool
) -> tuple[list[torch.Tensor], np.ndarray]:
    """(d_i per parameter, finite bool [R]) from the losses [R] of one unit, a replicate each.

    scale: the preconditioner. unit_norm: d_i has norm 1 over all parameters of its replicate. Where it is not finite, d_i is 0.
    """
    import torch

    R = len(loss)
    found = torch.autograd.grad(loss.sum(), list(parameters), allow_unused=True)
    d = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    if scale is not None:
        d = [g * s for g, s in zip(d, scale, strict=True)]
    squares = sum(g.reshape(R, -1).double().pow(2).sum(1) for g in d)
    finite = torch.isfinite(squares) & torch.isfinite(loss)
    factor = torch.where(finite, 1 / squares.sqrt().clamp_min(1e-300), 0.0) if unit_norm else finite.double()
    if unit_norm or not finite.all():
        d = [torch.nan_to_num(g.reshape(R, -1), 0.0, 0.0, 0.0).mul(factor[:, None].to(g)).view_as(g) for g in d]
    return d, finite.cpu().numpy()


def measure(
    parameters: Sequence[torch.Tensor],
    gradient_loss: Callable[[int, int], torch.Tensor],
    probe_losses: Callable[[int], torch.Tensor],
    *,
    units: int,
    micro: int,
    step: float,
    edge: Edge = "raw_fd",
    scale: Sequence[torch.Tensor] | None = None,
    module: torch.nn.Module | None = None,
    shared_gradient: bool = False,
) -> Influence:
    """Influence of every unit on every unit by lookahead (Method, step 1; `pair_exact`: step 2).

    gradient_loss(i, m): mean loss of micro-batch m of unit i's train half, [R], with a graph. probe_losses(m): mean loss of
    micro-batch m of every unit's probe half, [R, K], in one forward pass. units, micro: K and M. step: eta_p, in the unit of the
    learning rate. scale: see :func:`preconditioner`. shared_gradient: one direction per unit, from gradient_loss(i, 0), for all
    micro-batches (cheaper by K (M - 1) backward passes; its standard errors leave out the train half's noise).

    raw_fd: A_ij = L_j(theta) - L_j(theta - eta d_i). rel_loss: that over L_j(theta). unit_step: with d_i / |d_i|.
    pair_exact: A = B / 2 with B_ij = Ltot(theta after j, i) - Ltot(theta after i, j), so that D = B; Ltot is the mean over units.
    Raises UserError for pair_exact with more than 8 units.
    """
    import torch

    if edge == "pair_exact" and units > MOST_PAIRS:
        raise UserError(f"edge = pair_exact takes at most {MOST_PAIRS} units per window, there are {units}; choose raw_fd.")

    def look(m: int) -> np.ndarray:
        with torch.no_grad():
            return probe_losses(m).double().cpu().numpy()

    def move(d: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for p, change in zip(parameters, d, strict=True):
                p.sub_(change, alpha=step)

    with untouched(parameters, module) as back:
        base = np.stack([look(m) for m in range(micro)])  # [M, R, K]
        usable = np.isfinite(base).all(0)  # [R, K]
        A = np.zeros((micro, *usable.shape, units))
        if edge != "pair_exact":
            for i in range(units):
                for m in range(micro):
                    if m == 0 or not shared_gradient:
                        d, finite = directions(gradient_loss(i, m), parameters, scale, edge == "unit_step")
                        usable[:, i] &= finite
                    move(d)
                    A[m, :, i] = base[m] - look(m)
                    back()
        else:
            total = np.zeros_like(A)
            for m in range(micro):
                for i in range(units):
                    first, finite = directions(gradient_loss(i, m), parameters, scale, False)
                    usable[:, i] &= finite
                    for j in (j for j in range(units) if j != i):
                        move(first)
                        second, _ = directions(gradient_loss(j, m), parameters, scale, False)
                        move(second)
                        after = look(m)
                        total[m, :, i, j] = np.where(usable, after, 0.0).sum(-1) / np.maximum(usable.sum(-1), 1)
                        back()
            with np.errstate(invalid="ignore"):  # inf - inf where a pair of steps diverged
                A = (np.swapaxes(total, -1, -2) - total) / 2
    if edge == "rel_loss":
        A = A / base[:, :, None, :]
    usable &= (np.isfinite(A) | ~usable[:, None, :]).all((0, 3))  # a unit whose step throws another one off is dropped
    return summarise(A, base, usable)


def summarise(A: np.ndarray, base: np.ndarray, usable: np.ndarray) -> Influence:
    """Means and standard errors over the first axis of A [M, R, K, K] and base [M, R, K]; usable: bool [R, K].

    D's error comes from the differences of each micro-batch, so that what A_ij and A_ji share cancels.
    """
    both = usable[:, :, None] & usable[:, None, :]
    A = np.where(both, A, 0.0)
    D = A - np.swapaxes(A, -1, -2)
    M = len(A)

    def error(values: np.ndarray) -> np.ndarray:
        return values.std(0, ddof=1) / np.sqrt(M) if M > 1 else np.full(values.shape[1:], np.nan)

    A_mean, D_mean, A_se, D_se = (np.where(both, x, np.nan) for x in (A.mean(0), D.mean(0), error(A), error(D)))
    return Influence(A_mean, D_mean, A_se, D_se, base.mean(0))


def threshold(se_D: np.ndarray, z: float) -> np.ndarray:
    """tau = z SE(D_ij), [..., K, K]; 0 where no error is known (one micro-batch) and the unit is not dropped."""
    return np.where(np.isnan(se_D), 0.0, z * se_D)


def blend(old: Influence | None, new: Influence, keep: float = 0.7) -> Influence:
    """A <- keep A + (1 - keep) A_new (Method, step 4); errors of independent measurements. Losses are the new ones.

    A unit that was dropped in one of the two has the other's values.
    """
    if old is None:
        return new

    def mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, keep * a + (1 - keep) * b))

    def mix_error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.sqrt(np.where(np.isnan(a), b**2, np.where(np.isnan(b), a**2, (keep * a) ** 2 + ((1 - keep) * b) ** 2)))

    A, D = mix(old.A, new.A), mix(old.D, new.D)
    return Influence(A, D, mix_error(old.se, new.se), mix_error(old.se_D, new.se_D), new.losses)


def project(vectors: np.ndarray, r: int, seed: int, chunk: int = 4096) -> np.ndarray:
    """Random signs, float64 [n, d] -> [n, r]: inner products are kept in expectation (Johnson, Lindenstrauss; step 5 b).

    The relative error of <x, y> is about |x| |y| / (<x, y> sqrt(r)). The sign matrix is made in chunks of rows.
    """
    rng = np.random.default_rng(seed)
    vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
    result = np.zeros((len(vectors), r))
    for start in range(0, vectors.shape[1], chunk):
        part = vectors[:, start : start + chunk]
        result += part @ (2.0 * rng.integers(0, 2, size=(part.shape[1], r)) - 1.0)
    return result / np.sqrt(r)


def representatives(features: np.ndarray, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """k-means of units by features, float64 [n, d] (step 5 a): (cluster of each unit int [n], unit nearest each centre int [k']).

    k' <= k: empty clusters are left out and the rest renumbered.
    """
    from scipy.cluster.vq import kmeans2

    features = np.asarray(features, dtype=np.float64)
    centres, labels = kmeans2(features, min(k, len(features)), minit="++", rng=np.random.default_rng(seed))
    names, labels = np.unique(labels, return_inverse=True)
    away = ((features[None] - centres[names][:, None]) ** 2).sum(-1)  # [k', n]
    away[labels[None] != np.arange(len(names))[:, None]] = np.inf
    return labels, away.argmin(1)


def expand(matrix: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Units inherit what their clusters' representatives have: [k, k] -> [n, n], 0 within a cluster (nan if it was dropped)."""
    inherited = matrix[np.ix_(labels, labels)]
    return np.where(labels[:, None] == labels[None, :], 0.0 * inherited, inherited)
