"""D3's idea without noise: quadratic units of which every order is tried.

Each problem has n units L_i(theta) = (theta - c_i)' H_i (theta - c_i) / 2, one step of gradient descent per unit from
theta = 0, and the mean loss of all units after the last step as the outcome. Regret of an order is
(outcome - best) / (worst - best) over all n! orders: 0 best, 1 worst, about 0.5 for a random order (exact mean reported).
On problems with more units than can be enumerated, the approximate order's F is compared with the exact one's.
Source: paper card d3, "Small-scale replication" 1; the formulas are our reconstruction, the paper's body was not readable.
"""

from __future__ import annotations

from itertools import permutations
from typing import Literal, NamedTuple

import numpy as np

from posttrain.core import cli, determinism, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.midtrain.ordering import exact_order, objective, score_order

METHODS = ("lop_d", "score_d", "pair_exact", "random", "reversed_lop_d", "easy_first", "hard_first")


class Config(JobConfig):
    problems: int = key(150, help="quadratic problems", gt=1)
    units: int = key(5, help="units per problem; all orders are enumerated", gt=1, le=7)
    large_problems: int = key(40, help="problems on which the approximate order meets the exact one", gt=1)
    large_units: int = key(12, help="units of those", gt=2, le=12)
    dimensions: int = key(6, help="parameters of a problem", gt=0)
    step_sizes: list[float] = key([0.02, 0.05, 0.1], help="step sizes eta, each on the same problems", min_length=1)
    curvature: Literal["uniform", "wishart"] = key(
        "uniform", help="H: rotated, eigenvalues uniform in [0.1, 2]; or M'M / dimensions with standard normal M"
    )
    spread: float = key(0.3, help="standard deviation of the private part of a minimum; the shared part has 1", ge=0)


class Problems(NamedTuple):
    """P problems of n units in d dimensions, float64."""

    H: np.ndarray  # [P, n, d, d], symmetric positive semidefinite
    c: np.ndarray  # [P, n, d], minima


def draw(rng: np.random.Generator, job: Config, problems: int, units: int) -> Problems:
    """Random curvatures, and minima that share a part within a problem."""
    size = (problems, units, job.dimensions)
    if job.curvature == "wishart":
        M = rng.normal(size=(*size, job.dimensions))
        H = np.swapaxes(M, -1, -2) @ M / job.dimensions
    else:
        Q, _ = np.linalg.qr(rng.normal(size=(*size, job.dimensions)))
        H = Q * rng.uniform(0.1, 2.0, size=size)[..., None, :] @ np.swapaxes(Q, -1, -2)
    return Problems(H, rng.normal(size=(problems, 1, job.dimensions)) + job.spread * rng.normal(size=size))


def losses(problems: Problems, theta: np.ndarray) -> np.ndarray:
    """Loss of every unit at theta [P, q, d]: float64 [P, q, n]."""
    away = theta[:, :, None] - problems.c[:, None]
    return 0.5 * np.einsum("pqnd,pnde,pqne->pqn", away, problems.H, away, optimize=True)


def descend(problems: Problems, theta: np.ndarray, units: np.ndarray, eta: float) -> np.ndarray:
    """theta [P, q, d] after one step on each of units (int [P, q, k] or [q, k]) in turn."""
    units = np.broadcast_to(units, (len(problems.c), *units.shape[-2:]))
    row = np.arange(len(problems.c))[:, None]
    for k in range(units.shape[-1]):
        u = units[:, :, k]
        theta = theta - eta * np.einsum("pqde,pqe->pqd", problems.H[row, u], theta - problems.c[row, u])
    return theta


def influence(problems: Problems, eta: float) -> np.ndarray:
    """A[p, i, j] = L_j(theta) - L_j(theta - eta g_i) at theta = 0 (Method, step 1, `raw_fd`), float64 [P, n, n]."""
    P, n, d = problems.c.shape
    moved = descend(problems, np.zeros((P, n, d)), np.arange(n)[:, None], eta)
    return losses(problems, np.zeros((P, 1, d))) - losses(problems, moved)


def pair_benefit(problems: Problems, eta: float) -> np.ndarray:
    """B[p, i, j] = Ltot(after j, i) - Ltot(after i, j), Ltot the mean over units (Method, step 2), float64 [P, n, n]."""
    P, n, d = problems.c.shape
    pairs = np.array([(i, j) for i in range(n) for j in range(n)])
    total = losses(problems, descend(problems, np.zeros((P, n * n, d)), pairs, eta)).mean(2).reshape(P, n, n)
    return np.swapaxes(total, 1, 2) - total


def regrets(problems: Problems, eta: float) -> dict[str, np.ndarray]:
    """Regret per method, float64 [P]; `random` is the exact mean over all orders.

    `score_d` is the net-score heuristic with local search and without the graph: at threshold 0 the graph has an edge per
    pair, its acyclic part orders all units, and the heuristic would be the exact order.
    """
    P, n, d = problems.c.shape
    orders = np.array(list(permutations(range(n))))
    total = losses(problems, descend(problems, np.zeros((P, len(orders), d)), orders, eta)).mean(2)
    best, worst = total.min(1, keepdims=True), total.max(1, keepdims=True)
    regret = (total - best) / (worst - best)
    number = {tuple(order): k for k, order in enumerate(orders.tolist())}
    A, B = influence(problems, eta), pair_benefit(problems, eta)
    start = losses(problems, np.zeros((P, 1, d)))[:, 0]
    found: dict[str, list] = {name: [] for name in METHODS if name != "random"}
    for p in range(P):
        D = A[p] - A[p].T
        lop = exact_order(D)
        found["lop_d"].append(lop)
        found["score_d"].append(score_order(D, constrained=False).units)
        found["pair_exact"].append(exact_order(B[p]))
        found["reversed_lop_d"].append(lop[::-1])
        found["easy_first"].append(np.argsort(start[p], kind="stable").tolist())
        found["hard_first"].append(np.argsort(-start[p], kind="stable").tolist())
    picked = {name: np.array([regret[p, number[tuple(o)]] for p, o in enumerate(chosen)]) for name, chosen in found.items()}
    return {name: regret.mean(1) if name == "random" else picked[name] for name in METHODS}


def approximation(problems: Problems) -> np.ndarray:
    """F of the approximate order over F of the exact one, float64 [P]; 1 is the best, 0 the mean random order.

    Approximate as for any number of units: the graph's cycles are broken greedily, then net scores and swaps under the graph.
    The step size drops out: D of quadratics is proportional to its square.
    """
    A = influence(problems, 0.05)
    found = []
    for D in A - np.swapaxes(A, 1, 2):
        near = score_order(D, exact=0).units
        found.append(objective(D, near) / objective(D, exact_order(D)))
    return np.array(found)


def main(job: Config) -> None:
    rng = np.random.default_rng(determinism.derive(job.seed, "testbed"))
    problems = draw(rng, job, job.problems, job.units)
    large = draw(rng, job, job.large_problems, job.large_units)
    share = approximation(large)
    rows, metrics = [], {"approximation": manifest.metric(share)}
    for eta in job.step_sizes:
        found = regrets(problems, eta)
        rows += [{"problem": p, "eta": eta, **{n: float(v[p]) for n, v in found.items()}} for p in range(job.problems)]
        metrics |= {f"{name}/eta{eta:g}": manifest.metric(values) for name, values in found.items()}
    near = [{"problem": p, "share": float(x)} for p, x in enumerate(share)]
    files = [tables.write(rows, job.folder / "regrets.parquet"), tables.write(near, job.folder / "approximation.parquet")]
    manifest.publish(job, metrics, files)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
