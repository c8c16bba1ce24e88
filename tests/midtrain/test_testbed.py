"""The test bed without noise: bounds of the card, and its numbers against an independent computation."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from posttrain.core import manifest, tables
from posttrain.midtrain import testbed


def config(**options) -> testbed.Config:
    return testbed.Config(output=Path("midtrain/testbed/t/seed0/manifest.json"), **options)


@pytest.mark.parametrize("curvature, spread", [("uniform", 0.3), ("wishart", 0.5)])
def test_the_bounds_of_the_card(curvature, spread):
    problems = testbed.draw(np.random.default_rng(1), config(curvature=curvature, spread=spread), 150, 5)
    for eta in (0.02, 0.05, 0.1):
        found = {name: values.mean() for name, values in testbed.regrets(problems, eta).items()}
        assert found["lop_d"] <= 0.30 and found["score_d"] <= 0.35 and found["reversed_lop_d"] >= 0.65, (eta, found)
        assert found["pair_exact"] <= (0.08 if curvature == "uniform" else 0.12), (eta, found)
        assert found["random"] == pytest.approx(0.5, abs=0.05)
        assert found["pair_exact"] < found["lop_d"] < found["easy_first"] < found["random"] < found["hard_first"]


def test_regrets_against_a_loop():
    job = config(dimensions=3)
    problems = testbed.draw(np.random.default_rng(0), job, 3, 4)
    found, eta = testbed.regrets(problems, 0.1), 0.1
    for p in range(3):
        outcome = {}
        for order in permutations(range(4)):
            theta = np.zeros(3)
            for u in order:
                theta = theta - eta * problems.H[p, u] @ (theta - problems.c[p, u])
            away = theta - problems.c[p]
            outcome[order] = sum(0.5 * a @ H @ a for a, H in zip(away, problems.H[p], strict=True)) / 4
        low, high = min(outcome.values()), max(outcome.values())
        assert found["random"][p] == pytest.approx(np.mean([(v - low) / (high - low) for v in outcome.values()]), abs=1e-9)
        start = [0.5 * c @ H @ c for c, H in zip(problems.c[p], problems.H[p], strict=True)]
        assert found["easy_first"][p] == pytest.approx((outcome[tuple(np.argsort(start))] - low) / (high - low), abs=1e-9)
        step = eta * problems.H[p, 1] @ problems.c[p, 1]
        away = step - problems.c[p, 2]
        assert testbed.influence(problems, eta)[p, 1, 2] == pytest.approx(start[2] - 0.5 * away @ problems.H[p, 2] @ away)


def test_the_job_writes_a_row_per_problem_and_step_size(tmp_path):
    path = tmp_path / "midtrain/testbed/uniform/seed3/manifest.json"
    path.parent.mkdir(parents=True)
    testbed.main(testbed.Config(output=path, seed=3, problems=20, step_sizes=[0.02, 0.1], large_problems=3, large_units=6))
    rows = tables.read(path.parent / "regrets.parquet")
    assert len(rows) == 40 and list(rows[0]) == ["problem", "eta", *testbed.METHODS]
    assert all(0 <= row[name] <= 1 for row in rows for name in testbed.METHODS)
    metric = manifest.read(path).metrics["lop_d/eta0.1"]
    values = [row["lop_d"] for row in rows if row["eta"] == 0.1]
    assert metric.value == pytest.approx(np.mean(values)) and metric.n == 20
    assert metric.se == pytest.approx(np.std(values, ddof=1) / np.sqrt(20))
    near = tables.read(path.parent / "approximation.parquet")
    assert len(near) == 3 and manifest.read(path).metrics["approximation"].value == pytest.approx(
        np.mean([r["share"] for r in near])
    )


def test_the_approximation_against_every_order():
    problems = testbed.draw(np.random.default_rng(2), config(curvature="wishart", dimensions=3, spread=1.0), 24, 6)
    shares = testbed.approximation(problems)
    for eta in (0.01, 0.1):  # the step size drops out
        A = testbed.influence(problems, eta)
        for p in range(24):
            D = A[p] - A[p].T
            every = np.array([np.triu(D[np.ix_(o, o)], 1).sum() for o in map(list, permutations(range(6)))])
            assert np.abs(every / every.max() - shares[p]).min() < 1e-9  # the share of an order that exists
    assert shares.max() <= 1 + 1e-12 and shares.min() < 1 - 1e-6 and shares.mean() > 0.9
