"""Parts that all plots are made of: a canvas with a heading, direct labels, several drawings in one SVG file.

Text stays text, and the same inputs give the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core import manifest
from posttrain.report.artifacts import GRID, INK, MUTED, PAPER, Artifacts

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
WIDTH = 8.6  # inches; heights follow from what is drawn
SMALL = 9.5  # points
FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"  # layout is measured with the first; the others are not wider
STYLE = {
    "svg.hashsalt": "posttrain",  # ids follow from content alone
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
}


def canvas(
    task: str,
    subtitle: str,
    height: float,
    *,
    rows: int = 1,
    columns: int = 1,
    left: float = 0.75,
    right: float = 0.3,
    top: float = 0.1,
    bottom: float = 0.55,
    gap: float = 0.5,
) -> tuple[Figure, list[Axes]]:
    """A figure with a heading and axes, each `height` inches high. Margins in inches, so that no text moves them."""
    from matplotlib.figure import Figure

    lines = textwrap.wrap(subtitle, 118)
    head = 0.42 + 0.18 * len(lines) + top
    total = head + rows * (height + bottom) + (rows - 1) * top
    figure = Figure(figsize=(WIDTH, total))
    figure.text(0.1 / WIDTH, 1 - 0.27 / total, task, fontsize=12.5, weight="bold")
    for i, line in enumerate(lines):
        figure.text(0.1 / WIDTH, 1 - (0.49 + 0.18 * i) / total, line, fontsize=SMALL, color=MUTED)
    width = (WIDTH - left - right - gap * (columns - 1)) / columns
    axes = []
    for i in range(rows * columns):
        low = total - head - height - (i // columns) * (height + bottom + top)
        axes.append(figure.add_axes(((left + i % columns * (width + gap)) / WIDTH, low / total, width / WIDTH, height / total)))
    return figure, axes


def note(task: str, text: str) -> Figure:
    """In place of a drawing: why there is none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8))
    figure.text(0.1 / WIDTH, 1 - 0.27 / 0.8, task, fontsize=12.5, weight="bold")
    figure.text(0.1 / WIDTH, 1 - 0.52 / 0.8, text, color=MUTED)
    return figure


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average of [T] values; the window shrinks at both ends, so that no value is invented there."""
    import numpy as np

    reach = np.minimum(np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]), window // 2)
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart, in the order of `wanted` and centred on it, within [low, high] if they fit."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    groups: list[tuple[float, list[int]]] = []  # (lowest place, members); groups that touch are joined

    def settle(members: list[int]) -> tuple[float, list[int]]:
        centre, reach = sum(wanted[i] for i in members) / len(members), gap * (len(members) - 1)
        return max(min(centre - reach / 2, high - reach), low), members

    for i in order:
        groups.append(settle([i]))
        while len(groups) > 1 and groups[-2][0] + gap * len(groups[-2][1]) > groups[-1][0]:
            (_, left), (_, right) = groups.pop(-2), groups.pop(-1)
            groups.append(settle(left + right))
    places = {i: start + gap * n for start, members in groups for n, i in enumerate(members)}
    return [places[i] for i in range(len(wanted))]


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]], height: float) -> None:
    """A direct legend: each line's name right of the axes, joined to the line's end. ends: (x, y, name, colour)."""
    low, high = axes.get_ylim()
    places = spread([y for _, y, _, _ in ends], (high - low) * 0.2 / height, low, high)
    for (x, y, name, colour), place in zip(ends, places, strict=True):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 1.3, "shrinkA": 2, "shrinkB": 1, "relpos": (0, 0.5)}
        axes.annotate(
            name, (x, y), (1.05, place), textcoords=axes.get_yaxis_transform(), va="center", fontsize=SMALL, arrowprops=arrow
        )


def label_points(axes: Axes, points: list[tuple[float, float, str, str]], lines: list[tuple[float, float]]) -> None:
    """A name near each point, clear of points, names and `lines` as far as there is room. points: (x, y, name, colour)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    axes.autoscale_view()  # until then transData does not know the points
    renderer, scale, frame = FigureCanvasAgg(axes.figure).get_renderer(), axes.figure.dpi / 72, axes.get_window_extent()
    markers = axes.transData.transform(np.array([point[:2] for point in points]))
    drawn = axes.transData.transform(np.array(lines))
    boxes: dict[int, Bbox] = {}
    chosen: dict[int, tuple[float, float]] = {}
    for i in [*range(len(points)), *range(len(points))]:  # the second time every name knows all the others
        probe = axes.text(0, 0, points[i][2], fontsize=SMALL)
        size = probe.get_window_extent(renderer)
        probe.remove()
        best = None
        for dx in (9, -9, 18, -18, 30, -30, 44, -44):
            for dy in (0, 10, -10, 18, -18, 28, -28, 40, -40):
                corner = markers[i] + np.array([dx, dy]) * scale
                box = Bbox.from_bounds(
                    corner[0] - (size.width if dx < 0 else 0), corner[1] - size.height / 2, size.width, size.height
                )
                path = [markers[i] + (corner - markers[i]) * share for share in (0.3, 0.5, 0.7, 0.9)]
                near = [np.hypot(*(markers - step).T) < 7 * scale for step in path]
                cost = 12 * sum(box.padded(5 * scale).contains(*dot) for dot in markers) + 2 * sum(
                    box.contains(*d) for d in drawn
                )
                cost += 15 * sum(box.overlaps(other) for j, other in boxes.items() if j != i)
                cost += 5 * sum(hit.sum() - hit[i] for hit in near) + (abs(dx) + abs(dy)) * 0.05
                cost += 8 * (np.hypot(*(markers - corner).T).argmin() != i)  # it would seem to name another point
                cost += 30 * (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
                if best is None or cost < best[0]:
                    best = (cost, (dx, dy), box)
        chosen[i], boxes[i] = best[1:]
    for (x, y, name, colour), (dx, dy) in zip(points, chosen.values(), strict=True):
        side = 0 if dx > 0 else 1
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 1, "shrinkA": 1, "shrinkB": 4, "relpos": (side, 0.5)}
        axes.annotate(
            name, (x, y), (dx, dy), textcoords="offset points", ha=("left", "right")[side], va="center", fontsize=SMALL,
            arrowprops=arrow if dy or abs(dx) > 9 else None,
        )  # fmt: skip


def over_seeds(data: Artifacts) -> str:
    return "one seed" if len(data.seeds) == 1 else f"mean over {len(data.seeds)} seeds"


# --- files ------------------------------------------------------------------------------------------------------


def nested(figure: Figure, name: str) -> ElementTree.Element:
    """The figure as an <svg> element with id `name`, which all ids inside begin with: drawings can share a page."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(stream.getvalue())
    for element in root.findall(f"{{{SVG}}}metadata"):
        root.remove(element)
    for element in root.iter():
        for attribute, value in list(element.attrib.items()):
            if attribute == "id":
                element.set(attribute, f"{name}-{value}")
            elif attribute == f"{{{XLINK}}}href":
                del element.attrib[attribute]
                element.set("href", value.replace("#", f"#{name}-", 1))
            elif "url(#" in value:
                element.set(attribute, re.sub(r"url\(#", f"url(#{name}-", value))
            elif attribute == "style":
                element.set(attribute, value.replace("'DejaVu Sans'", FONTS))
    root.set("id", name)
    return root


def stacked(figures: dict[str, Figure], plot: str) -> str:
    """One SVG document with the drawings of all tasks, one below the other."""
    drawings, top = [nested(figure, f"{plot}-{task}") for task, figure in figures.items()], 0.0
    for drawing in drawings:
        _, _, width, height = map(float, drawing.attrib["viewBox"].split())
        drawing.attrib |= {"y": f"{top:g}", "width": f"{width:g}", "height": f"{height:g}"}
        top += height
    size = {"width": f"{WIDTH * 72:g}pt", "height": f"{top:g}pt", "viewBox": f"0 0 {WIDTH * 72:g} {top:g}"}
    root = ElementTree.Element(f"{{{SVG}}}svg", size | {"version": "1.1", "role": "img"})
    ElementTree.SubElement(root, f"{{{SVG}}}title").text = plot.replace("_", " ")
    root.extend(drawings)
    ElementTree.register_namespace("", SVG)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def write(plots: Iterable[Callable[[Artifacts, str], Figure]], data: Artifacts, tasks: Iterable[str], folder: Path) -> None:
    """One file per plot, named after its function, with a drawing per task."""
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        for draw in plots:
            figures = {task: draw(data, task) for task in tasks}
            manifest.write_atomically(folder / f"{draw.__name__}.svg", stacked(figures, draw.__name__))
