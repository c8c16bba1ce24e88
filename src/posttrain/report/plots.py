"""Five plots of the study as SVG: RL curves, pass@1 before and after RL, rank reversal, weights, retention.

Each file stacks one drawing per task (a nested <svg> whose id is <plot>-<task>), so that the page can show a task's own.
Text stays text, and the same inputs give the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

from posttrain.core import cli, manifest
from posttrain.core.stats import Interval
from posttrain.report.artifacts import BASE, GRID, INK, MUTED, PAPER, Artifacts, ReportConfig, interval

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
STATISTICS = {
    "weight_mean": "Mean weight",
    "weight_ess": "ESS / tokens",
    "weight_floor": "Share at floor",
    "weight_cap": "Share at cap",
}


class Config(ReportConfig):
    """Keys of the plots; --output is one of the five files, the others lie beside it."""


# --- parts of a drawing -----------------------------------------------------------------------------------------


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


def dumbbells(axes: Axes, data: Artifacts, samples: dict[str, list[list[np.ndarray]]], *, share: bool) -> None:
    """Per start: hollow before RL, filled after it, with the 95 % interval; small dots are the seeds, if several.

    samples: start -> values before and after RL, one array per seed.
    """
    for row, start in enumerate(data.starts):
        colour, marker = data.colour(start), data.marker(start)
        before, after = (interval(values, share=share) for values in samples[start])
        axes.plot([before.estimate, after.estimate], [row, row], color=colour, linewidth=3, alpha=0.3, solid_capstyle="butt")
        for one, values, shift, face in ((before, samples[start][0], -0.17, PAPER), (after, samples[start][1], 0.17, colour)):
            axes.plot([one.low, one.high], [row + shift] * 2, color=colour, linewidth=1.3)
            if len(values) > 1:
                axes.plot([v.mean() for v in values], [row + shift] * len(values), "o", color=colour, markersize=3, alpha=0.6)
            axes.plot(one.estimate, row + shift, marker, color=colour, markerfacecolor=face, markersize=6.5)
        text = f"{before.estimate:.3f} → {after.estimate:.3f}"
        axes.annotate(text, (1.02, row), xycoords=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
    axes.set_yticks(range(len(data.starts)), data.starts)
    axes.set_ylim(len(data.starts) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


# --- the plots --------------------------------------------------------------------------------------------------


def rl_curves(data: Artifacts, task: str) -> Figure:
    """Mean reward over GRPO steps, one line per start."""
    references = {start: f"rl/grpo/{task}-{start}" for start in data.starts}
    if not data.available(references.values()):
        return note(task, "No RL run on this task.")
    curves = {start: curve for start, reference in references.items() if (curve := data.curve(reference, "reward"))}
    if not curves:
        return note(task, "The RL runs on this task logged no reward.")
    window = max(3, max(len(steps) for steps, _ in curves.values()) // 8 | 1)
    band = "" if len(data.seeds) == 1 else ", band: lowest to highest seed"
    subtitle = (
        f"Mean reward of each step's completions, {over_seeds(data)}. Moving average over {window} steps, faint: each step{band}."
    )
    height, ends = 3.0, []
    figure, (axes,) = canvas(task, subtitle, height, right=1.8)
    for start, (steps, values) in curves.items():
        colour, mean = data.colour(start), values.mean(0)
        line = smooth(mean, window)
        if len(values) > 1:
            low, high = smooth(values.min(0), window), smooth(values.max(0), window)
            axes.fill_between(steps, low, high, color=colour, alpha=0.06, linewidth=0)
        axes.plot(steps, mean, color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(steps, line, color=colour, linewidth=2, linestyle="--" if start == BASE else "-")
        ends.append((steps[-1], line[-1], start, colour))
    axes.set_ylim(0, max(axes.get_ylim()[1], 0.02))
    axes.margins(x=0.01)
    axes.set(xlabel="GRPO step", ylabel="Reward")
    label_ends(axes, ends, height)
    return figure


def before_after(data: Artifacts, task: str) -> Figure:
    """pass@1 before and after RL from each start."""
    if not data.evaluated("reasoning", task):
        return note(task, "No reasoning evaluation on this task.")
    samples = {start: [data.passes(task, name) for name in data.checkpoints(start)] for start in data.starts}
    dots = "" if len(data.seeds) == 1 else "; small dots: each seed"
    subtitle = f"pass@1 on held-out items before RL (hollow) and after it (filled), {over_seeds(data)}, 95% intervals{dots}."
    figure, (axes,) = canvas(task, subtitle, 0.36 * len(data.starts), left=1.6, right=1.3)
    dumbbells(axes, data, samples, share=True)
    axes.set(xlabel="pass@1", xlim=(-0.015, min(axes.get_xlim()[1], 1.015)))
    return figure


def rank_reversal(data: Artifacts, task: str) -> Figure:
    """SFT score against pass@1 after RL, of the arms that minimise a likelihood loss."""
    references = {arm: f"sft/train/{task}-{arm}" for arm in data.arms}
    if not data.available(references.values()) or not data.evaluated("reasoning", task):
        return note(task, "No reasoning evaluation of SFT runs on this task.")
    arms = [arm for arm, reference in references.items() if data.manifest(reference, data.seeds[0]).config.get("loss") == "nll"]
    if not arms:
        return note(task, "No arm of this task was trained on the likelihood loss.")
    subtitle = (
        "Arms trained on the likelihood loss; vertical lines: 95% intervals over items. Ranks are compared within a seed. "
        "If a better SFT score made a better start, the points would fall from upper left to lower right."
    )
    columns = min(len(data.seeds), 3)
    rows = -(-len(data.seeds) // columns)
    figure, found = canvas(task, subtitle, 2.5, rows=rows, columns=columns, top=0.35 if len(data.seeds) > 1 else 0.1, gap=0.6)
    nll = {arm: [float(values.mean()) for values in data.nll(task, arm)] for arm in arms}
    after = {arm: [interval([values], share=True) for values in data.passes(task, f"rl_{arm}")] for arm in arms}
    for i, (axes, seed) in enumerate(zip(found, data.seeds, strict=False)):
        occupied = []
        for arm in arms:
            x, (y, low, high), colour = nll[arm][i], after[arm][i], data.colour(arm)
            axes.plot([x, x], [low, high], color=colour, linewidth=1.2, alpha=0.5)
            axes.plot(x, y, data.marker(arm), color=colour, markersize=7.5)
            occupied += [(x, low + (high - low) * step / 4) for step in (0, 1, 3, 4)]
        axes.margins(x=0.3 if columns > 1 else 0.12, y=0.15)
        axes.set_xlabel("NLL per trace after SFT (nats)")
        if len(data.seeds) > 1:
            axes.set_title(f"seed {seed}", fontsize=10, loc="left")
        if i % columns == 0:
            axes.set_ylabel("pass@1 after RL")
        label_points(axes, [(nll[arm][i], after[arm][i].estimate, arm, data.colour(arm)) for arm in arms], occupied)
    for axes in found[len(data.seeds) :]:
        axes.set_axis_off()
    return figure


def weights(data: Artifacts, task: str) -> Figure:
    """Statistics of PEAR's weights over SFT steps."""
    references = {arm: f"sft/train/{task}-{arm}" for arm in data.arms}
    if not data.available(references.values()):
        return note(task, "No SFT run on this task.")
    weighting = {arm: str(data.manifest(ref, data.seeds[0]).config.get("weighting")) for arm, ref in references.items()}
    arms = [arm for arm in data.arms if weighting[arm].startswith("pear_")]
    curves = {(arm, name): curve for arm in arms for name in STATISTICS if (curve := data.curve(references[arm], name))}
    if not curves:
        return note(task, "No arm of this task has PEAR weights.")
    window = max(3, max(len(steps) for steps, _ in curves.values()) // 8 | 1)
    subtitle = f"Weights of response tokens, {over_seeds(data)}. Moving average over {window} steps, faint: each step."
    figure, found = canvas(task, subtitle, 1.9, columns=len(STATISTICS), left=0.5, top=0.35, bottom=0.85)
    for axes, (name, title) in zip(found, STATISTICS.items(), strict=True):
        for arm in arms:
            if (arm, name) in curves:
                steps, values = curves[arm, name]
                axes.plot(steps, values.mean(0), color=data.colour(arm), linewidth=0.7, alpha=0.3)
                axes.plot(steps, smooth(values.mean(0), window), color=data.colour(arm), linewidth=1.8, label=arm)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(xlabel="SFT step", ylim=(0, max(axes.get_ylim()[1], 0.1)))
        if all((values == 0).all() for (_, one), (_, values) in curves.items() if one == name):
            axes.text(0.5, 0.5, "none at any step", transform=axes.transAxes, ha="center", fontsize=SMALL, color=MUTED)
    handles = {label: line for axes in found for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    place = {"loc": "lower left", "bbox_to_anchor": (0.4 / WIDTH, 0), "borderaxespad": 0.1}
    figure.legend(handles.values(), handles.keys(), ncols=5, frameon=False, fontsize=SMALL, **place)
    return figure


def retention(data: Artifacts, task: str) -> Figure:
    """Loss on held-out real text before and after RL from each start; the base is the reference."""
    if not data.evaluated("retention", task):
        return note(task, "No retention evaluation on this task: loss on held-out text was not measured.")
    samples = {start: [data.bits_per_byte(task, name) for name in data.checkpoints(start)] for start in data.starts}
    base: Interval = interval(samples[BASE][0])
    dots = "" if len(data.seeds) == 1 else "; small dots: each seed"
    subtitle = (
        f"Loss on held-out text before RL (hollow) and after it (filled), {over_seeds(data)}, 95% intervals{dots}. "
        "Dashed: the base model before any training on the task; further right, more was forgotten."
    )
    figure, (axes,) = canvas(task, subtitle, 0.36 * len(data.starts), left=1.6, right=1.3)
    axes.axvline(base.estimate, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    dumbbells(axes, data, samples, share=False)
    axes.set_xlabel("Bits per byte")
    return figure


PLOTS = (rl_curves, before_after, rank_reversal, weights, retention)


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


def main(job: Config) -> None:
    import matplotlib

    matplotlib.use("Agg")
    data = Artifacts(job)
    with matplotlib.rc_context(STYLE):
        for draw in PLOTS:
            figures = {task: draw(data, task) for task in job.tasks}
            manifest.write_atomically(job.folder / f"{draw.__name__}.svg", stacked(figures, draw.__name__))


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
