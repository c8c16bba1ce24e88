"""Linear ordering of train-units from a directed influence matrix: exact, and by net scores under a graph.

The paper's body was not readable; every formula here is our reconstruction of D3 (paper card d3, Method, step 3).
`D` is antisymmetric, float64 [n, n], in nats: D[i, j] > 0 says that training on unit i before unit j is better than after.
An order is a list of n unit numbers, first unit first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EXACT = 12
"""Largest number of units for the subset dynamic programme: n * 2^n steps."""


class Order(NamedTuple):
    """A permutation with what led to it."""

    units: list[int]
    scores: np.ndarray  # float64 [n], net out-influence in nats; nan for a dropped unit
    edges: np.ndarray  # bool [n, n], the graph that the order respects
    above: int  # edges above the threshold, before cycles were broken
    fell_back: bool  # no edge was sure: this is the seeded random order


def objective(D: np.ndarray, order: Sequence[int]) -> float:
    """F(pi) = sum over i before j of D[i, j], nats. Its mean over all permutations is 0 (D is antisymmetric)."""
    index = np.asarray(order)
    return float(np.triu(np.asarray(D)[np.ix_(index, index)], 1).sum())


def exact_order(D: np.ndarray) -> list[int]:
    """A permutation that maximises F, by dynamic programming over subsets; equals go to the lowest numbers first.

    best[S] = max over the last unit j of S of best[S - j] + sum of D[i, j] over i in S - j. Raises ValueError for n > 12.
    """
    D = np.asarray(D, dtype=np.float64)
    n = len(D)
    if n > EXACT:
        raise ValueError(f"exact_order takes at most {EXACT} units, there are {n}; use score_order")
    into = np.zeros((1 << n, n))  # into[S, j]: weight of all edges from S to j
    for subset in range(1, 1 << n):
        low = (subset & -subset).bit_length() - 1
        into[subset] = into[subset & (subset - 1)] + D[low]
    best, last = np.zeros(1 << n), np.zeros(1 << n, dtype=int)
    for subset in range(1, 1 << n):
        members = [j for j in range(n) if subset >> j & 1]
        values = [best[subset ^ (1 << j)] + into[subset ^ (1 << j), j] for j in members]
        pick = max(range(len(members)), key=lambda k: (values[k], members[k]))
        best[subset], last[subset] = values[pick], members[pick]
    order, subset = [], (1 << n) - 1
    while subset:
        order.append(int(last[subset]))
        subset ^= 1 << order[-1]
    return order[::-1]


def greedy_order(W: np.ndarray) -> list[int]:
    """An order with little weight against it, for a weighted digraph, non-negative [n, n]: O(n^2) with numpy rows.

    Sinks go to the end, sources to the front, otherwise the vertex with the largest (out - in) weight goes to the front
    (after Eades, Lin and Smyth 1993).
    """
    W = np.asarray(W, dtype=np.float64)
    alive, front, back = np.ones(len(W), dtype=bool), [], []
    out, into = W.sum(1), W.sum(0)
    degree_out, degree_in = (W > 0).sum(1), (W > 0).sum(0)  # counts, so that rounding hides no sink

    def take(v: int) -> int:
        alive[v] = False
        for total, degree, column in ((out, degree_out, W[:, v]), (into, degree_in, W[v])):
            total -= column
            degree -= column > 0
        return v

    while alive.any():
        sinks, sources = np.flatnonzero(alive & (degree_out == 0)), np.flatnonzero(alive & (degree_in == 0))
        if len(sinks):
            back.append(take(int(sinks[-1])))
        elif len(sources):
            front.append(take(int(sources[0])))
        else:
            front.append(take(int(np.argmax(np.where(alive, out - into, -np.inf)))))
    return front + back[::-1]


def reaches(edges: np.ndarray, start: int, goal: int) -> bool:
    """Whether a path of `edges` (bool [n, n]) leads from start to goal."""
    seen, stack = {start}, [start]
    while stack:
        v = stack.pop()
        if v == goal:
            return True
        new = [int(u) for u in np.flatnonzero(edges[v]) if int(u) not in seen]
        seen.update(new)
        stack += new
    return False


def acyclic(D: np.ndarray, tau: np.ndarray | float, exact: int = EXACT) -> tuple[np.ndarray, np.ndarray]:
    """(edges above tau, the same without a feedback arc set), both bool [n, n].

    Up to `exact` units the set has minimum weight: the arcs against an exact linear order. Beyond, arcs against the greedy
    order, heaviest put back first where they close no cycle.
    """
    D = np.asarray(D, dtype=np.float64)
    above = tau < D
    W = np.where(above, D, 0.0)
    order = exact_order(W - W.T) if len(D) <= exact else greedy_order(W)
    place = np.argsort(order)
    kept = above & (place[:, None] < place[None, :])
    removed = np.argwhere(above & ~kept)
    for i, j in removed[np.argsort(-W[tuple(removed.T)], kind="stable")] if len(removed) else ():
        if not reaches(kept, int(j), int(i)):
            kept[i, j] = True
    return above, kept


def topological(edges: np.ndarray, rank: np.ndarray) -> list[int]:
    """Kahn's algorithm: among the units whose predecessors are done, the lowest rank (float or int [n]) goes first."""
    waiting = edges.sum(0)
    ready = [(rank[v], v) for v in np.flatnonzero(waiting == 0)]
    heapq.heapify(ready)
    order = []
    while ready:
        _, v = heapq.heappop(ready)
        order.append(int(v))
        for u in np.flatnonzero(edges[v]):
            waiting[u] -= 1
            if not waiting[u]:
                heapq.heappush(ready, (rank[u], u))
    if len(order) < len(edges):
        raise ValueError("the graph has a cycle")
    return order


def local_search(D: np.ndarray, order: Sequence[int], fixed: np.ndarray) -> list[int]:
    """Swap neighbours i, j (i first) while D[j, i] > 0, unless fixed[i, j] (bool [n, n]). A swap adds 2 D[j, i] to F."""
    order, moved = list(order), True
    while moved:
        moved = False
        for k in range(len(order) - 1):
            i, j = order[k], order[k + 1]
            if D[j, i] > 0 and not fixed[i, j]:
                order[k], order[k + 1], moved = j, i, True
    return order


def interleave(order: Sequence[int], scores: np.ndarray, domains: Sequence, noise: float) -> list[int]:
    """Runs of units whose scores lie within `noise` nats of the run's first are dealt out by domain, round robin.

    order: descending in score; inside a domain its order stays. Blocks of one domain cause short-term forgetting (card, pilot).
    """
    result, k = [], 0
    while k < len(order):
        run = [u for u in order[k:] if scores[order[k]] - scores[u] <= noise]
        k += len(run)
        piles: dict = {}
        for u in run:
            piles.setdefault(domains[u], []).append(u)
        while piles:
            for name in list(piles):
                result.append(piles[name].pop(0))
                if not piles[name]:
                    del piles[name]
    return result


def score_order(
    D: np.ndarray,
    tau: np.ndarray | float = 0.0,
    *,
    fallback: Sequence[int] | None = None,
    domains: Sequence | None = None,
    noise: float = 0.0,
    constrained: bool = True,
    exact: int = EXACT,
) -> Order:
    """D3's order: net out-influence, repaired to respect the graph, then adjacent swaps that keep it.

    D: antisymmetric float64 [n, n], nats; rows and columns of nan are dropped units, which go last. tau: scalar or [n, n],
    edges need D > tau. fallback: the seeded random order (identity if None), returned as it is if no edge is above tau, and
    the order of equals. domains: label per unit, for ties within `noise` nats. constrained=False leaves the graph out.

    Both s and -s are tried as priority and the better F wins, so that without a graph F >= 0, the mean of random orders.
    Under a graph F can be negative: the graph may force it.
    """
    D = np.asarray(D, dtype=np.float64)
    n = len(D)
    fallback = list(range(n)) if fallback is None else [int(u) for u in fallback]
    if sorted(fallback) != list(range(n)):
        raise ValueError("fallback is not a permutation of the units")
    usable = ~np.isnan(D + np.where(np.eye(n, dtype=bool), 0.0, np.broadcast_to(tau, (n, n)))).all(1)
    clean = np.where(usable[:, None] & usable[None, :], D, 0.0)
    if np.isnan(clean).any():
        raise ValueError("D has nan inside the rows of units that are not dropped")
    scores = np.where(usable, clean.sum(1), np.nan)
    limit = np.where(usable[:, None] & usable[None, :], tau, np.inf)
    np.fill_diagonal(limit, np.inf)
    above, edges = acyclic(clean, limit, exact)
    if not above.any():
        return Order(fallback, scores, edges, 0, True)
    if not constrained:
        edges = np.zeros_like(edges)
    alive = [u for u in fallback if usable[u]]
    repeated = domains is not None and len(set(domains)) < n
    tied = np.zeros_like(edges)
    if repeated:  # swaps must not undo the interleaving
        tied = (np.abs(scores[:, None] - scores) <= noise) & ~np.eye(n, dtype=bool)
    found = []
    for sign in (1.0, -1.0):
        priority = sorted(alive, key=lambda u: -sign * scores[u])  # stable: equals stay in the fallback's order
        if repeated:
            priority = interleave(priority, sign * scores, domains, noise)
        priority += [u for u in fallback if not usable[u]]
        rank = np.argsort(priority)
        found.append(local_search(clean, topological(edges, rank), edges | tied))
    better = objective(clean, found[1]) > objective(clean, found[0])
    return Order(found[1 if better else 0], scores, edges, int(above.sum()), False)


def satisfied(D: np.ndarray, order: Sequence[int]) -> float:
    """2 F / sum |D|, in [-1, 1]: 1 if every pair stands as D wants it, 0 for the mean random order; 0 if D = 0."""
    clean = np.nan_to_num(np.asarray(D, dtype=np.float64))
    total = np.abs(clean).sum()
    return 2 * objective(clean, order) / total if total else 0.0


def kendall(a: Sequence[int], b: Sequence[int]) -> float:
    """Kendall's tau between two orders of the same units: 1 equal, -1 reversed; 1 for a single unit."""
    place_a, place_b = np.argsort(a), np.argsort(b)
    n = len(place_a)
    if n < 2:
        return 1.0
    signs = np.sign(place_a[:, None] - place_a) * np.sign(place_b[:, None] - place_b)
    return float(signs.sum() / (n * (n - 1)))
