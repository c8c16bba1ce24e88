"""Main effects and averages of PRISM, against the numbers that the paper prints."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.core.effects import average, main_effects
from posttrain.core.errors import UserError
from posttrain.core.stats import bootstrap

GPQA = {  # MC-mid/RL-MC, MC/MCS, MCS/MC, MCS/MCS -> mid effect, RL-mix effect
    "LLaMA-3.1-8B": ((23.06, 24.75, 34.01, 36.03), (11.1, 1.9)),
    "Granite-3.3-8B": ((35.52, 35.69, 52.86, 51.52), (16.6, -0.6)),
    "Mistral-7B": ((29.12, 28.28, 40.91, 41.75), (12.6, 0.0)),
}


def table(a, b, c, d):
    return {"MC": {"MC": a, "MCS": b}, "MCS": {"MC": c, "MCS": d}}


@pytest.mark.parametrize("model", GPQA)
def test_printed_tables(model):
    cells, expected = GPQA[model]
    found = main_effects(table(*cells))
    assert (round(float(found.mid), 1), round(float(found.rl), 1)) == expected


def test_interaction_is_the_difference_of_differences():
    assert main_effects(table(*GPQA["Granite-3.3-8B"][0])).interaction == pytest.approx(-1.51)
    assert main_effects(table(1.0, 2.0, 10.0, 11.0)).interaction == 0  # additive
    assert main_effects(table(0.0, 0.0, 0.0, 8.0)) == (4.0, 4.0, 8.0)


def test_per_item_effects_have_the_effects_of_the_means_as_their_mean():
    items = np.random.default_rng(0).integers(0, 2, size=(50, 4)).astype(float)
    per_item, of_means = main_effects(table(*items.T)), main_effects(table(*items.mean(0)))
    assert per_item.mid.shape == (50,)
    assert np.allclose([effect.mean() for effect in per_item], of_means)


def test_interval_by_bootstrap_over_items():
    """Items that differ much but alike in all cells: the paired interval of the effect is narrow, as the effect is constant."""
    base = np.random.default_rng(1).uniform(0, 100, size=(40, 1))
    items = base + np.array([[0.0, 1.0, 10.0, 12.0]])
    found = bootstrap([items], lambda means: main_effects(table(*np.moveaxis(means, -1, 0))).mid, resamples=200)
    assert found.estimate == pytest.approx(10.5) and found.high - found.low < 1e-9


@pytest.mark.parametrize("cells", [{}, {"MC": {"MC": 1, "MCS": 2}}, {"a": {"x": 1, "y": 2}, "b": {"x": 1, "z": 2}}])
def test_other_tables_are_refused(cells):
    with pytest.raises(UserError, match="two mid-training mixes with the same two RL mixes"):
        main_effects(cells)


def test_order_of_the_second_row_does_not_matter():
    cells = {"MC": {"MC": 1.0, "MCS": 2.0}, "MCS": {"MCS": 30.0, "MC": 10.0}}
    assert main_effects(cells) == (18.5, 10.5, 19.0)


def test_average_is_over_three_domains():
    assert round(float(average(20.38, 52.04, 52.86)), 2) == 41.76
    assert round(float(average(0.04, 2.24, 20.20)), 2) == 7.49
    assert np.allclose(average(np.array([0.0, 3.0]), np.array([3.0, 3.0]), np.array([6.0, 3.0])), 3)
