"""What each schedule does with what it sees: multisets, limits, hand cases, restarts."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.core.errors import UserError
from posttrain.midtrain import schedules
from posttrain.midtrain.influence import Influence
from posttrain.midtrain.schedules import MIXTURE, SCHEDULES, Rule, Scheduler, Seen

K, W = 4, 6
WINDOWS = np.arange(K * W).reshape(W, K).tolist()
DOMAINS = ["abcd"[u % K] for u in range(K * W)]


def matrices(D: np.ndarray, se: float = 0.0) -> Influence:
    return Influence(D / 2, D, np.full(D.shape, se), np.full(D.shape, se), np.ones(len(D)))


def antisymmetric(seed: int) -> np.ndarray:
    A = np.random.default_rng(seed).normal(size=(K, K))
    return A - A.T


def scheduler(name: str, seed: int = 0, rule: Rule | None = None, domains=DOMAINS, **more) -> Scheduler:
    if name == "skill_it":
        more = {"graph": np.eye(K)} | more
    if name == "doremi" and "weights" not in more:
        more = {"reference": np.zeros(K)} | more
    return Scheduler(name, rule or Rule(), WINDOWS, domains, seed, **more)


def seen(window: int) -> Seen:
    rng = np.random.default_rng(window)
    return Seen(np.sort(rng.random(K)) + 1 / (1 + window), matrices(antisymmetric(window)), rng.normal(size=(K, 9)))


def run(s: Scheduler, first: int = 0) -> list:
    return [s.decide(w, seen(w)) for w in range(first, W)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_on_the_same_amount_and_order_only_ones_on_the_same_units(name):
    found = run(scheduler(name))
    assert [len(d.order) for d in found] == [K] * W
    if name not in MIXTURE:
        assert [sorted(d.order) for d in found] == WINDOWS


def test_random_orders_follow_seed_and_window_alone():
    orders = [d.order for d in run(scheduler("random"))]
    assert orders == [d.order for d in run(scheduler("random"))] != [d.order for d in run(scheduler("random", seed=1))]
    assert len({tuple(np.mod(o, K)) for o in orders}) > 1
    quiet = scheduler("d3", rule=Rule(z=1e9))
    fallen = [quiet.decide(w, Seen(np.ones(K), matrices(antisymmetric(w), se=1.0))) for w in range(W)]
    assert [d.order for d in fallen] == orders and all(d.fell_back for d in fallen), "nothing sure is exactly the random order"


def test_easy_first_and_hard_first_sort_by_loss():
    losses = np.array([0.5, 2.0, np.nan, 0.1])
    assert scheduler("easy_first").decide(1, Seen(losses)).order == [7, 4, 5, 6]
    assert scheduler("hard_first").decide(1, Seen(losses)).order == [5, 4, 7, 6]


def test_reversed_d3_is_d3_backwards():
    one, other = scheduler("d3"), scheduler("d3_reversed")
    for w in range(W):
        assert one.decide(w, seen(w)).order == other.decide(w, seen(w)).order[::-1]
    D = antisymmetric(0)
    D[1], D[:, 1] = np.nan, np.nan
    last = Seen(np.ones(K), matrices(D))
    assert scheduler("d3").decide(0, last).order[-1] == scheduler("d3_reversed").decide(0, last).order[-1] == 1


def test_d3_puts_influence_first():
    D = np.zeros((K, K))
    for i, j in ((2, 0), (0, 3), (3, 1)):
        D[i, j], D[j, i] = 1.0, -1.0
    found = scheduler("d3").decide(2, Seen(np.ones(K), matrices(D, se=0.5)))
    assert found.order == [10, 8, 11, 9] and found.above == 3 and found.refreshed
    assert np.reshape(found.influence["D"], (K, K)).tolist() == D.tolist()


def test_influence_is_averaged_where_units_have_distinct_domains():
    a, b = (Seen(np.ones(K), matrices(antisymmetric(s))) for s in (0, 1))
    s = scheduler("d3")
    s.decide(0, a)
    assert np.allclose(np.reshape(s.decide(1, b).influence["D"], (K, K)), 0.7 * a.influence.D + 0.3 * b.influence.D)
    alike = scheduler("d3", domains=[""] * (K * W))
    alike.decide(0, a)
    assert np.allclose(np.reshape(alike.decide(1, b).influence["D"], (K, K)), b.influence.D), "no unit is the other's successor"


def test_influence_is_due_after_some_windows_or_a_fall_of_the_loss():
    s = scheduler("d3", rule=Rule(refresh=3))
    assert s.due(np.ones(K))
    s.decide(0, Seen(np.ones(K), matrices(antisymmetric(0))))
    assert not s.due(np.full(K, 0.96)) and s.due(np.full(K, 0.94))
    kept = s.decide(1, Seen(np.full(K, 0.96)))
    assert not kept.refreshed and kept.influence["D"] == s.decide(2, Seen(np.ones(K))).influence["D"]
    assert s.due(np.ones(K))
    assert not scheduler("random").due(np.zeros(K)) and scheduler("random").needs(0) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_goes_on_after_a_restart_as_if_there_was_none(name):
    whole = run(scheduler(name))
    resumed = scheduler(name)
    for decision in whole[:3]:
        resumed.replay(decision)
    assert run(resumed, 3) == whole[3:]


def test_skill_it_by_hand_and_in_its_limits():
    history = [np.array([1.0, 0.0]), np.array([0.0, 2.0]), np.array([1.0, 1.0])]
    graph = np.array([[1.0, 0.5], [0.0, 1.0]])
    weights = schedules.skill_it(history, graph, 0.5, 2)  # sum of G L over the last two: [1 + 1.5, 3]
    assert np.allclose(weights, np.exp([1.25, 1.5]) / np.exp([1.25, 1.5]).sum())
    assert np.allclose(schedules.skill_it(history, np.eye(2), 0.0, 3), 0.5)
    uniform = [scheduler("skill_it", rule=Rule(eta=0)).decide(w, seen(w)).order for w in range(W)]
    assert all(sorted(u % K for u in order) == [0, 1, 2, 3] for order in uniform)


def test_doremi_by_hand_and_in_its_limits():
    w = np.array([0.25, 0.75])
    found = schedules.doremi(w, np.array([2.0, 1.0]), np.array([1.0, 3.0]), 1.0, 0.1)
    raised = np.array([0.25 * np.e, 0.75])
    assert np.allclose(found, 0.9 * raised / raised.sum() + 0.05)
    same = np.array([1.0, 2.0])
    assert np.allclose(schedules.doremi(w, same, same, 1.0, 0.0), w), "a model at its reference keeps its weights"
    fixed = scheduler("doremi", weights=np.array([0.5, 0.5, 0.0, 0.0]))
    assert fixed.needs(0) is None and {u % K for d in run(fixed) for u in d.order} == {0, 1}


def test_a_mixture_takes_new_units_of_a_domain_before_it_repeats_one():
    s = scheduler("doremi", weights=np.array([0.5, 0.5, 0.0, 0.0]))
    taken = [u for d in run(s) for u in d.order if u % K == 0]
    assert taken[:W] == [0, 4, 8, 12, 16, 20] and taken[W:] == taken[: len(taken) - W]
    assert s.probed(3) == [12, 13, 14, 15]


def test_systematic_sampling_keeps_counts_next_to_their_share():
    rng, weights = np.random.default_rng(0), np.array([0.5, 0.1, 0.4])
    counts = np.array([np.bincount(schedules.apportion(weights, 5, rng), minlength=3) for _ in range(2000)])
    assert (np.abs(counts - 5 * weights) < 1).all() and np.allclose(counts.mean(0), 5 * weights, atol=0.05)
    assert schedules.apportion(np.array([0.0, 1.0]), 3, rng) == [1, 1, 1]


def test_pair_balance_by_hand_and_against_random_orders():
    g = np.array([[1.0], [0.0], [0.0], [1.0], [5.0]])
    # pair (0, 1): difference 1 on a sum of 0, a tie, 0 to the front; pair (2, 3): -1 balances it, 2 to the front; 4 has no partner
    assert schedules.pair_balance(g, [0, 1, 2, 3, 4]) == [0, 2, 4, 3, 1]

    def herding(order, vectors):
        centred = vectors - vectors.mean(0)
        return np.linalg.norm(np.cumsum(centred[order], 0), axis=1).max()

    better = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        vectors, order = rng.normal(size=(64, 8)), rng.permutation(64).tolist()
        start = herding(order, vectors)
        for _ in range(10):
            order = schedules.pair_balance(vectors, order)
        assert sorted(order) == list(range(64))
        better.append(herding(order, vectors) < start)
    assert np.mean(better) > 0.9


def test_what_a_schedule_lacks_is_named():
    with pytest.raises(UserError, match=r"skill_it needs a graph over the 4 domains"):
        scheduler("skill_it", graph=np.eye(2))
    with pytest.raises(UserError, match="doremi needs the reference model's loss"):
        scheduler("doremi", reference=None)
