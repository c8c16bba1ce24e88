"""Arithmetic of PRISM's two-way table (arXiv 2603.17074): mid-training mix times RL mix, and its average of domains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from posttrain.core.errors import UserError


class Effects(NamedTuple):
    """Each a float64 scalar or array, in the unit of the cells."""

    mid: np.ndarray
    rl: np.ndarray
    interaction: np.ndarray


def main_effects(cells: Mapping[str, Mapping[str, np.ndarray | float]]) -> Effects:
    """Main effects of a 2 x 2 table cells[mid][rl]; an effect is the second named level minus the first.

    mid: mean over RL mixes of Y[second, r] - Y[first, r]. rl: mean over mid-training mixes of Y[m, second] - Y[m, first].
    interaction: (Y[second, second] - Y[second, first]) - (Y[first, second] - Y[first, first]).
    Cells are numbers or arrays of one shape (per item, or resampled means [..., R]); the results have that shape. All three
    are linear in the cells, so the mean over items of the result is the result of the means: pass it to
    :func:`posttrain.core.stats.bootstrap` as the statistic, or its per-item values as the sample.
    Raises :class:`UserError` unless there are two mixes of each kind, the same RL mixes for both.
    """
    mids = list(cells)
    rls = list(cells[mids[0]]) if mids else []
    if len(mids) != 2 or len(rls) != 2 or set(cells[mids[1]]) != set(rls):
        shown = {m: list(row) for m, row in cells.items()}
        raise UserError(f"main effects need two mid-training mixes with the same two RL mixes each, the cells are {shown}.")
    (a, b), (c, d) = ([np.asarray(cells[m][r], dtype=np.float64) for r in rls] for m in mids)
    return Effects(mid=((c - a) + (d - b)) / 2, rl=((b - a) + (d - c)) / 2, interaction=(d - c) - (b - a))


def average(code: np.ndarray | float, math: np.ndarray | float, gpqa: np.ndarray | float) -> np.ndarray:
    """The paper's AVG: mean of the three domains Code, Math and GPQA-Diamond, not of the six benchmarks in them."""
    return (np.asarray(code, dtype=np.float64) + math + gpqa) / 3
