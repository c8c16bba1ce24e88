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


def small_sample_factor(seeds: int, confidence: float = 0.95) -> float:
    """Widening for few seeds: Student quantile over normal quantile, times sqrt(S / (S - 1)).

    Resampling S clusters underestimates the between-cluster variance by (S - 1) / S and uses a normal-like quantile;
    with S = 3 the plain percentile interval covers about 75 % instead of 95 %. One seed: 1 (seeds are not sampled).
    """
    from scipy.stats import norm, t

    if seeds < 2:
        return 1.0
    q = 0.5 + confidence / 2
    return float(t.ppf(q, seeds - 1) / norm.ppf(q) * math.sqrt(seeds / (seeds - 1)))


def bootstrap(
    samples: list[np.ndarray], statistic=None, *, resamples: int = 4000, seed: int = 0, confidence: float = 0.95
) -> Interval:
    """Interval of a statistic of paired values, over items within a seed and over seeds.

    samples: one array per seed, each float64 [items, arms] or [items] (items may differ between seeds; the arms of a
    row belong together and are resampled together). statistic: maps the mean over items [..., arms] (or [...]) of one
    seed to [...]; default identity. The estimate is the mean of the statistic over seeds.

    One seed: SciPy's paired percentile bootstrap over items. Several: seeds are drawn first, items inside each, and
    the half-widths are widened by :func:`small_sample_factor`.
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
    drawn = rng.integers(len(samples), size=(resamples, len(samples)))
    means = per_seed[drawn, np.arange(resamples)[:, None]].mean(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    factor = small_sample_factor(len(samples), confidence)
    return Interval(estimate, estimate - factor * (estimate - low), estimate + factor * (high - estimate))


def kendall_tau(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Kendall's tau-b along the last axis, vectorised; 0 where one side is constant (no order to compare).

    x, y: float [..., arms]. Returns float64 [...].
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    i, j = np.triu_indices(x.shape[-1], k=1)
    dx, dy = np.sign(x[..., i] - x[..., j]), np.sign(y[..., i] - y[..., j])
    scale = np.sqrt((dx != 0).sum(-1) * (dy != 0).sum(-1).astype(np.float64))
    return np.divide((dx * dy).sum(-1), scale, out=np.zeros(scale.shape), where=scale > 0)
