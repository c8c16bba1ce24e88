"""Statistics of the ledger: unbiased pass@k, Wilson intervals, paired bootstrap over items and seeds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from posttrain.core.errors import UserError


class Interval(NamedTuple):
    estimate: float
    low: float
    high: float


def pass_at_k(n: np.ndarray | int, c: np.ndarray | int, k: int) -> np.ndarray:
    """Unbiased pass@k = 1 - C(n-c, k) / C(n, k) per item (Chen et al. 2021, eq. 1), float64.

    n: samples drawn, c: correct ones, both int [items] or scalars. Raises if k > n, where it is undefined.
    """
    n, c = np.broadcast_arrays(np.asarray(n, dtype=np.int64), np.asarray(c, dtype=np.int64))
    if k < 1 or (n < k).any():
        raise UserError(f"pass@{k} needs at least {max(k, 1)} samples per item, there are {int(n.min())}; raise `samples`.")
    if (c < 0).any() or (c > n).any():
        raise ValueError("0 <= c <= n does not hold")
    miss = np.ones(n.shape)
    for j in range(k):  # product form: no factorials, exact to rounding
        miss *= np.clip((n - c - j) / (n - j), 0.0, None)
    return 1.0 - miss


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a proportion (SciPy). n = 0 is an error."""
    from scipy.stats import binomtest

    if n == 0:
        raise UserError("a proportion of zero items has no interval; check that the split is not empty.")
    found = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(successes / n, float(found.low), float(found.high))


def student_half_width(values: np.ndarray, confidence: float = 0.95) -> float:
    """Half-width of Student's interval of a mean of independent values, float64 [S], S >= 2."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def bootstrap(
    samples: list[np.ndarray], statistic=None, *, resamples: int = 4000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Interval of a statistic of paired values, over items within a seed and over seeds.

    samples: one array per seed, each float64 [items, arms] or [items] (items may differ between seeds; the arms of a
    row belong together and are resampled together). statistic: maps the mean over items [..., arms] (or [...]) of one
    seed to [...]; default identity. The estimate is the mean of the statistic over seeds.

    One seed: SciPy's paired percentile bootstrap over items; what another seed would give is not in it. Several seeds:
    Student's interval over the seeds' statistics, which already carry the items' noise, but never narrower than a
    bootstrap of the items with the seeds held fixed (a few seeds can agree by chance, or on a discrete statistic).
    """
    from scipy.stats import bootstrap as scipy_bootstrap

    statistic = statistic or (lambda means: means)
    samples = [np.asarray(s, dtype=np.float64) for s in samples]
    if not samples or any(len(s) == 0 for s in samples):
        raise UserError("an interval over zero items is undefined; check that every arm was evaluated.")
    estimate = float(np.mean([statistic(s.mean(0)) for s in samples]))
    if all(len(s) == 1 for s in samples):
        raise UserError("an interval needs at least two items.")
    rng = np.random.default_rng(seed)
    if len(samples) == 1:
        rows = np.arange(len(samples[0]))

        def over_items(index, axis=-1):
            return statistic(samples[0][index.astype(np.int64)].mean(axis=index.ndim - 1))

        found = scipy_bootstrap(
            (rows,),
            over_items,
            vectorized=True,
            method="percentile",
            batch=500,
            n_resamples=resamples,
            confidence_level=confidence,
            rng=rng,
        ).confidence_interval
        return Interval(estimate, float(found.low), float(found.high))
    per_seed = np.empty((len(samples), resamples))
    for s, values in enumerate(samples):
        for start in range(0, resamples, 500):
            index = rng.integers(len(values), size=(min(500, resamples - start), len(values)))
            per_seed[s, start : start + len(index)] = statistic(values[index].mean(1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(per_seed.mean(0), [tail, 1 - tail])
    half = student_half_width(np.array([statistic(s.mean(0)) for s in samples]), confidence)
    return Interval(estimate, min(float(low), estimate - half), max(float(high), estimate + half))
