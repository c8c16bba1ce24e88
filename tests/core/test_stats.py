"""Statistics against brute force, hand computation, SciPy and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.core.stats import Interval, bootstrap, pass_at_k, student_half_width, wilson

# --- pass@k ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_per_item_and_large_numbers():
    found = pass_at_k([16, 16, 16, 4], [0, 16, 3, 1], 4)
    exact = [0.0, 1.0, 1 - math.comb(13, 4) / math.comb(16, 4), 1.0]
    assert np.allclose(found, exact, atol=1e-12) and found.dtype == np.float64
    assert pass_at_k(10_000, 7, 1000) == pytest.approx(1 - math.comb(9993, 1000) / math.comb(10_000, 1000), rel=1e-9)
    assert np.array_equal(pass_at_k(8, np.arange(9), 1), np.arange(9) / 8)
    assert pass_at_k([], [], 2).shape == (0,)


@pytest.mark.parametrize(("n", "k"), [(4, 5), (4, 0), ([8, 2], 3), (0, 1)])
def test_pass_at_k_where_it_is_undefined(n, k):
    with pytest.raises(UserError, match=f"pass@{k} needs at least"):
        pass_at_k(n, 0, k)


@pytest.mark.parametrize("c", [-1, 5])
def test_pass_at_k_counts_must_fit(c):
    with pytest.raises(ValueError, match="0 <= c <= n"):
        pass_at_k(4, c, 1)


def test_pass_at_k_is_unbiased():
    """Mean over binomial draws of c equals 1 - (1 - p)^k, which the plug-in estimate misses."""
    n, k, p = 6, 3, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert np.dot(chance, pass_at_k(n, np.arange(n + 1), k)) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    plug_in = np.dot(chance, 1 - (1 - np.arange(n + 1) / n) ** k)
    assert abs(plug_in - (1 - (1 - p) ** k)) > 0.03


# --- Wilson ---------------------------------------------------------------------------------------------------


def test_wilson_by_hand():
    """8 of 10, z = 1.959964: centre (0.8 + z²/20) / (1 + z²/10) = 0.716740, half 0.226573."""
    found = wilson(8, 10)
    assert found.estimate == 0.8
    assert (found.low, found.high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_by_formula(pair):
    c, n = pair
    z, p = 1.959963984540054, c / n
    centre, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = wilson(c, n)
    assert found.low == pytest.approx(max(0, centre - half), abs=1e-9) and found.high == pytest.approx(
        min(1, centre + half), abs=1e-9
    )
    assert 0 <= found.low <= p <= found.high <= 1


def test_wilson_of_nothing():
    with pytest.raises(UserError, match="zero items"):
        wilson(0, 0)
    assert wilson(0, 1).low == 0.0 and wilson(1, 1).high == 1.0


# --- bootstrap ------------------------------------------------------------------------------------------------


def coverage(draw, truth: float, trials: int, **options) -> float:
    hits = 0
    for trial in range(trials):
        found = bootstrap(draw(np.random.default_rng(trial)), resamples=400, seed=trial, **options)
        hits += found.low <= truth <= found.high
    return hits / trials


def test_coverage_over_items_of_one_seed():
    """Skewed, heavy values, as differences of pass@k are. 1000 trials: the standard error of the coverage is 0.007."""
    found = coverage(lambda rng: [rng.choice([-1.0, 0.0, 0.0, 0.0, 1.0], size=80, p=[0.05, 0.3, 0.2, 0.2, 0.25])], 0.2, 1000)
    assert 0.92 <= found <= 0.98


def between(rng) -> list[np.ndarray]:
    """Three seeds whose true means differ as much as items within a seed do."""
    return [rng.normal(rng.normal(0, 1), 1, size=40) for _ in range(3)]


def test_coverage_over_three_seeds_with_variance_between_them():
    assert 0.92 <= coverage(between, 0.0, 1000) < 1.0


def test_that_simulation_has_power():
    """Pooling the items of the seeds, as if each were independent, covers far less."""
    assert coverage(lambda rng: [np.concatenate(between(rng))], 0.0, 100) < 0.6


def test_coverage_over_five_seeds_is_not_all_of_it():
    found = coverage(lambda rng: [rng.normal(rng.normal(0, 1), 1, size=20) for _ in range(5)], 0.0, 300)
    assert 0.90 <= found < 1.0


def test_width_shrinks_with_items():
    rng = np.random.default_rng(0)
    widths = [(f := bootstrap([rng.normal(size=n)])).high - f.low for n in (50, 800)]
    assert widths[1] < widths[0] / 3


def test_interval_of_a_mean_agrees_with_the_normal_one():
    values = np.random.default_rng(1).normal(3, 2, size=400)
    found = bootstrap([values])
    half = 1.96 * values.std() / 20
    assert found.estimate == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03) and found.high == pytest.approx(
        values.mean() + half, abs=0.03
    )


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_interval_over_many_seeds_agrees_with_the_normal_one(confidence):
    """Items that do not differ within a seed leave the variance between seeds alone."""
    from scipy.stats import norm

    levels = np.random.default_rng(7).normal(size=150)
    found = bootstrap([np.full(2, level) for level in levels], confidence=confidence)
    half = norm.ppf(0.5 + confidence / 2) * levels.std() / math.sqrt(150)
    assert found.high - found.estimate == pytest.approx(half, rel=0.1) and found.estimate - found.low == pytest.approx(
        half, rel=0.1
    )


def test_pairs_are_resampled_together():
    base = np.random.default_rng(2).normal(0, 100, size=50)
    for samples in ([np.stack([base + 1, base], 1)], [np.stack([base + 1, base], 1)] * 3):
        found = bootstrap(samples, lambda means: means[..., 0] - means[..., 1])
        assert np.allclose(found, (1, 1, 1), atol=1e-9)


def test_statistic_of_means_not_mean_of_statistics():
    rng = np.random.default_rng(3)
    values = rng.uniform(1, 3, size=(60, 2))
    found = bootstrap([values], lambda means: means[..., 0] / means[..., 1])
    assert found.estimate == pytest.approx(values[:, 0].mean() / values[:, 1].mean()) and found.low < found.estimate < found.high


def test_estimate_weighs_seeds_alike_though_items_differ():
    assert bootstrap([np.zeros(2), np.ones(100)]).estimate == 0.5


def test_same_seed_same_interval():
    values = [np.random.default_rng(4).normal(size=(30, 2)) for _ in range(3)]
    one = bootstrap(values[:1], lambda m: m[..., 0], seed=5)
    assert one == bootstrap(values[:1], lambda m: m[..., 0], seed=5) != bootstrap(values[:1], lambda m: m[..., 0], seed=6)
    assert bootstrap(values, lambda m: m[..., 0], seed=5) == bootstrap(values, lambda m: m[..., 0], seed=5)


def test_constant_values_have_no_width():
    assert bootstrap([np.full(10, 2.0)]) == Interval(2.0, 2.0, 2.0)
    assert bootstrap([np.full(10, 2.0)] * 2) == Interval(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "zero items"),
        ([np.array([])], "zero items"),
        ([np.ones(3), np.array([])], "zero items"),
        ([np.ones(1)], "at least two items"),
        ([np.ones(1), np.ones(1)], "at least two items"),
    ],
)
def test_intervals_that_do_not_exist(samples, words):
    with pytest.raises(UserError, match=words):
        bootstrap(samples)


def test_more_resamples_than_a_batch_and_not_a_multiple():
    values = np.random.default_rng(5).normal(size=20)
    assert all(math.isfinite(v) for v in bootstrap([values], resamples=777))
    assert all(math.isfinite(v) for v in bootstrap([values, values + 1], resamples=777))


def test_student_half_width_by_hand():
    """1, 2, 3: mean 2, sd 1, t(0.975, 2) = 4.302653, sqrt(3) = 1.732051."""
    assert student_half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.302653 / 1.732051, rel=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_item_noise_is_not_counted_twice(spread):
    """Over three seeds the interval is about as wide as Student's over seed means, whatever the seeds' own variance."""
    ratios = []
    for trial in range(200):
        rng = np.random.default_rng(trial)
        samples = [rng.normal(rng.normal(0, spread) if spread else 0.0, 1, size=100) for _ in range(3)]
        found = bootstrap(samples, resamples=400, seed=trial)
        ratios.append((found.high - found.low) / (2 * student_half_width(np.array([s.mean() for s in samples]))))
    assert min(ratios) >= 1 - 1e-9 and np.median(ratios) < 1.05


def test_seeds_that_agree_by_chance_do_not_make_the_interval_vanish():
    rng = np.random.default_rng(0)
    values = rng.normal(size=100)
    found = bootstrap([values, rng.permutation(values), rng.permutation(values)])  # equal means, so Student's has no width
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(300), rel=0.1)
