"""Five plots of the study as SVG: RL curves, pass@1 before and after RL, rank reversal, weights, retention.

Each file stacks one drawing per task (a nested <svg> whose id is <plot>-<task>), so that the page can show a task's own.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from posttrain.report.artifacts import GRID, INK, MUTED, PAPER, ReportConfig

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
WIDTH = 8.6  # inches; heights follow from the number of rows
STYLE = {
    "svg.hashsalt": "posttrain",  # ids follow from content alone: the same inputs give the same bytes
    "svg.fonttype": "none",  # text stays text: small, searchable, set in the page's font
    "font.family": ["DejaVu Sans", "Verdana", "Arial"],  # narrower fonts than the one measured with cannot overlap
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
}


class Config(ReportConfig):
    """Keys of the plots; --output is the first of the five files, the others lie beside it."""


# --- parts of a drawing -----------------------------------------------------------------------------------------


def canvas(title: str, subtitle: str, height: float, *, columns: int = 1, left=0.75, right=0.3, bottom=0.62, gap=0.55):
    """A figure with a heading and its axes in one row. Sizes in inches: what is drawn never depends on text extents."""
    from matplotlib.figure import Figure

    lines = textwrap.wrap(subtitle, 108)
    top = 0.48 + 0.18 * len(lines)
    height = height + top + bottom
    figure = Figure(figsize=(WIDTH, height))
    figure.text(0.1 / WIDTH, 1 - 0.27 / height, title, fontsize=12.5, weight="bold")
    for i, line in enumerate(lines):
        figure.text(0.1 / WIDTH, 1 - (0.48 + 0.18 * i) / height, line, fontsize=9.5, color=MUTED)
    width = (WIDTH - left - right - gap * (columns - 1)) / columns
    axes = [
        figure.add_axes(((left + i * (width + gap)) / WIDTH, bottom / height, width / WIDTH, (height - top - bottom) / height))
        for i in range(columns)
    ]
    return figure, axes


def note(task: str, text: str) -> Figure:
    """In place of a plot: why there is none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8))
    figure.text(0.1 / WIDTH, 1 - 0.27 / 0.8, task, fontsize=12.5, weight="bold")
    figure.text(0.1 / WIDTH, 1 - 0.52 / 0.8, text, fontsize=10, color=MUTED)
    return figure


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average of [T] values; the window shrinks at both ends, so that no value is invented there."""
    import numpy as np

    reach = np.minimum(np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]), window // 2)
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart, in the order of `wanted` and near it, within [low, high] if they fit."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], low, placed[-1] + gap if placed else low))
    limit = high
    for n in reversed(range(len(placed))):
        placed[n] = min(placed[n], limit)
        limit = placed[n] - gap
    return [placed[order.index(i)] for i in range(len(wanted))]


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]], inches: float) -> None:
    """A direct legend: each line's name right of the axes, joined to its end. ends: (x, y, name, colour)."""
    low, high = axes.get_ylim()
    places = spread([y for _, y, _, _ in ends], (high - low) * 0.19 / inches, low, high)
    for (x, y, name, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            name, (x, y), (1.04, place), textcoords=axes.get_yaxis_transform(), va="center", fontsize=9.5, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 1},
        )  # fmt: skip


def label_points(axes: Axes, points: list[tuple[float, float, str]], occupied: list[tuple[float, float]]) -> None:
    """A name beside each point, at the first of several places where it covers neither points nor other names."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    dots = axes.transData.transform(np.array(occupied))
    frame, taken = axes.get_window_extent(renderer), []
    for x, y, name in points:
        best = None
        for distance in (9, 20, 32):
            for dx, dy in ((1, 0), (-1, 0), (0.7, 0.9), (-0.7, 0.9), (0.7, -0.9), (-0.7, -0.9), (0, 1.3), (0, -1.3)):
                ha, va = ("left", "right", "center")[0 if dx > 0 else 1 if dx < 0 else 2], "center"
                text = axes.annotate(
                    name, (x, y), (dx * distance, dy * distance), textcoords="offset points", ha=ha, va=va, fontsize=9.5,
                    arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4},
                )  # fmt: skip
                box = text.get_window_extent(renderer) if distance == 0 else text.get_tightbbox(renderer)
                text_box = text._get_layout(renderer)[0].translated(*_origin(text, renderer))
                hits = 4 * sum(text_box.expanded(1.05, 1.2).contains(*dot) for dot in dots)
                hits += 6 * sum(text_box.overlaps(other) for other in taken)
                hits += 8 * (text_box.x0 < frame.x0 or text_box.x1 > frame.x1 or text_box.y0 < frame.y0 or text_box.y1 > frame.y1)
                if best is None or hits < best[0]:
                    if best:
                        best[1].remove()
                    best = (hits, text, text_box)
                else:
                    text.remove()
                del box
            if best[0] == 0:
                break
        taken.append(best[2])
