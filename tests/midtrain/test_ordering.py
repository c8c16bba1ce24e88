"""The linear ordering problem: against enumeration, under a graph, and at its edges."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from posttrain.midtrain import ordering
from posttrain.midtrain.ordering import exact_order, objective, score_order


def antisymmetric(n: int, seed: int) -> np.ndarray:
    A = np.random.default_rng(seed).normal(size=(n, n))
    return A - A.T


def respects(order: list[int], edges: np.ndarray) -> bool:
    place = np.argsort(order)
    return all(place[i] < place[j] for i, j in np.argwhere(edges))


def acyclic(edges: np.ndarray) -> bool:
    return not np.linalg.matrix_power(edges.astype(np.int64) + np.eye(len(edges), dtype=np.int64), len(edges)).trace() > len(
        edges
    )


@pytest.mark.parametrize("n", range(1, 8))
def test_the_dynamic_programme_equals_brute_force(n):
    for seed in range(6 if n < 7 else 2):
        D = antisymmetric(n, seed)
        found = exact_order(D)
        assert sorted(found) == list(range(n))
        assert objective(D, found) == pytest.approx(max(objective(D, p) for p in permutations(range(n))), abs=1e-12)


def test_the_dynamic_programme_refuses_large_problems():
    assert len(exact_order(antisymmetric(12, 0))) == 12
    with pytest.raises(ValueError, match="at most 12 units, there are 13"):
        exact_order(antisymmetric(13, 0))


def test_the_mean_of_F_over_all_orders_is_zero():
    D = antisymmetric(5, 3)
    assert np.mean([objective(D, p) for p in permutations(range(5))]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n", range(2, 8))
def test_the_heuristic_lies_between_the_random_mean_and_the_optimum(n):
    for seed in range(40):
        D = antisymmetric(n, seed) ** 3  # heavy tails: the score alone is misled
        found = score_order(D, constrained=False)
        assert sorted(found.units) == list(range(n))
        assert 0 <= objective(D, found.units) <= objective(D, exact_order(D)) + 1e-9
        gains = [D[j, i] for i, j in zip(found.units, found.units[1:], strict=False)]
        assert max(gains) <= 0, "a swap of neighbours would still gain"


def test_the_better_of_both_score_directions_is_taken():
    """The card's heuristic alone, descending scores and swaps, can fall below the random mean; ours cannot."""
    D = antisymmetric(7, 555) ** 5
    alone = ordering.local_search(D, np.argsort(-D.sum(1)), np.zeros((7, 7), dtype=bool))
    assert objective(D, alone) < 0 < objective(D, score_order(D, constrained=False).units)


def test_a_swap_of_neighbours_adds_twice_D():
    D = antisymmetric(6, 1)
    order = [3, 1, 0, 5, 4, 2]
    swapped = [3, 1, 5, 0, 4, 2]
    assert objective(D, swapped) - objective(D, order) == pytest.approx(2 * D[5, 0], abs=1e-12)


@pytest.mark.parametrize("tau", [0.0, 0.8, 1.6])
@pytest.mark.parametrize("exact", [12, 0])
def test_the_order_respects_an_acyclic_graph(tau, exact):
    for seed in range(30):
        D = antisymmetric(7, seed)
        found = score_order(D, tau, exact=exact)
        above, kept = ordering.acyclic(D, tau, exact)
        assert acyclic(kept) and not (kept & ~above).any() and found.above == above.sum() == (tau < D).sum()
        assert np.array_equal(found.edges, kept) and respects(found.units, kept)
        for i, j in np.argwhere(above & ~kept):
            assert ordering.reaches(kept, int(j), int(i)), "an arc was removed that closes no cycle"


def test_the_feedback_arc_set_of_small_graphs_has_minimum_weight():
    for seed in range(20):
        D, tau = antisymmetric(5, seed), 0.5
        above, kept = ordering.acyclic(D, tau)
        removed = D[above & ~kept].sum()
        backwards = []
        for p in permutations(range(5)):
            place = np.argsort(p)
            backwards.append(D[above & (place[:, None] > place[None])].sum())
        assert removed == pytest.approx(min(backwards), abs=1e-12)


def test_at_threshold_zero_the_graph_forces_the_exact_order():
    """Every pair has an edge then; what is left of the card's heuristic is the exact order."""
    for seed in range(10):
        D = antisymmetric(6, seed)
        assert score_order(D, 0.0).units == exact_order(D)


def test_a_graph_can_force_an_order_below_the_random_mean():
    """The card's 'never below the random mean' holds without a graph only: four sure edges against six that just miss."""
    D = np.triu(np.full((5, 5), -0.9), 1)
    D[np.arange(4), np.arange(1, 5)] = 1.1
    D = D - D.T
    found = score_order(D, 1.0)
    assert found.units == [0, 1, 2, 3, 4] and objective(D, found.units) < 0
    assert objective(D, score_order(D, constrained=False).units) > 0


def test_large_graphs_are_ordered_greedily():
    D = antisymmetric(60, 0) + 0.3 * np.sign(np.arange(60)[None] - np.arange(60)[:, None])
    found = score_order(D, 1.0)
    assert sorted(found.units) == list(range(60)) and respects(found.units, found.edges) and acyclic(found.edges > 0)
    assert objective(D, found.units) > 0
    chain = np.triu(np.ones((30, 30)), 1)
    hidden = np.random.default_rng(1).permutation(30)
    D = np.zeros((30, 30))
    D[np.ix_(hidden, hidden)] = chain - chain.T
    assert score_order(D, 0.5).units == hidden.tolist()
    assert ordering.greedy_order(np.maximum(D, 0)) == hidden.tolist()


def test_nothing_above_the_threshold_is_the_seeded_random_order():
    D, fallback = antisymmetric(6, 0), [4, 2, 0, 5, 1, 3]
    found = score_order(D, 1e9, fallback=fallback)
    assert found.units == fallback and found.fell_back and found.above == 0
    assert not score_order(D, 0.1, fallback=fallback).fell_back
    assert score_order(np.zeros((6, 6)), 0.0, fallback=fallback).units == fallback  # duplicates


def test_a_single_unit_and_wrong_fallbacks():
    assert score_order(np.zeros((1, 1))).units == [0]
    with pytest.raises(ValueError, match="not a permutation"):
        score_order(np.zeros((3, 3)), fallback=[0, 1, 1])


def test_duplicates_stand_in_the_fallbacks_order():
    D = np.zeros((4, 4))
    D[3, [0, 1, 2]] = 1.0
    D = D - D.T
    assert score_order(D, 0.5, fallback=[2, 0, 3, 1]).units == [3, 2, 0, 1]


def test_ties_are_interleaved_by_domain_never_in_blocks():
    scores = np.array([5.0, 1.0, 1.01, 1.02, 0.99, -4.0])
    order = [0, 3, 2, 1, 4, 5]
    assert ordering.interleave(order, scores, ["a", "a", "b", "b", "a", "b"], 0.1) == [0, 3, 1, 2, 4, 5]
    assert ordering.interleave(order, scores, ["a", "a", "b", "b", "a", "b"], 0.0) == order


def test_ties_of_repeated_domains_survive_the_local_search():
    D = np.zeros((4, 4))
    D[0, 1], D[0, 2], D[1, 2] = 0.01, 0.01, 0.02
    D[[0, 1, 2], 3] = 1.0
    D = D - D.T
    domains = ["a", "a", "b", "b"]
    assert score_order(D, 0.5, domains=domains, noise=0.1).units == [0, 2, 1, 3], "a b a, though D prefers 1 before 2"
    assert score_order(D, 0.5, domains=["a", "b", "c", "d"], noise=0.1).units == score_order(D, 0.5).units == [0, 1, 2, 3]


def test_swaps_leave_fixed_pairs_alone():
    D = np.array([[0, -1.0], [1.0, 0]])
    assert ordering.local_search(D, [0, 1], np.zeros((2, 2), dtype=bool)) == [1, 0]
    assert ordering.local_search(D, [0, 1], np.array([[False, True], [False, False]])) == [0, 1]


def test_dropped_units_go_last_and_change_nothing_else():
    D = antisymmetric(5, 2)
    alone = score_order(D[np.ix_([0, 1, 3, 4], [0, 1, 3, 4])], 0.3)
    D[2], D[:, 2] = np.nan, np.nan
    found = score_order(D, 0.3)
    assert found.units == [[0, 1, 3, 4][k] for k in alone.units] + [2]
    assert np.isnan(found.scores[2]) and np.isfinite(found.scores[[0, 1, 3, 4]]).all()
    D = antisymmetric(3, 0)
    D[0, 1] = np.nan
    with pytest.raises(ValueError, match="nan inside"):
        score_order(D)


def test_relabelled_units_are_ordered_alike():
    for seed in range(10):
        D, names = antisymmetric(7, seed), np.random.default_rng(seed).permutation(7)
        for tau in (0.4, 2.0):
            new = score_order(D[np.ix_(names, names)], tau, fallback=np.argsort(names).tolist())
            assert [int(names[u]) for u in new.units] == score_order(D, tau).units


def test_order_statistics_by_hand():
    D = np.array([[0, 1.0, 2.0], [-1.0, 0, -3.0], [-2.0, 3.0, 0]])
    assert ordering.satisfied(D, [0, 2, 1]) == 1 and ordering.satisfied(D, [1, 2, 0]) == -1
    assert ordering.satisfied(D, [0, 1, 2]) == pytest.approx((1 + 2 - 3) * 2 / 12)
    assert ordering.satisfied(np.zeros((2, 2)), [0, 1]) == 0
    assert ordering.kendall([0, 1, 2], [2, 1, 0]) == -1 and ordering.kendall([2, 0, 1], [2, 0, 1]) == 1
    assert ordering.kendall([0, 1, 2], [1, 0, 2]) == pytest.approx(1 / 3) and ordering.kendall([0], [0]) == 1
