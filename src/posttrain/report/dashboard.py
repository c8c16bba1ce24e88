"""The panels of panels.py on one self-contained page: inline SVG, no script, light and dark, narrow and wide.

It may be drawn while a study runs: a job counts once all its seeds have finished, and what is missing is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.core import cli, manifest
from posttrain.core.config import key
from posttrain.report.artifacts import BASE, COLOURS, Artifacts, ReportConfig, interval, reachable
from posttrain.report.page import number, ticks
from posttrain.report.panels import SECTIONS, Section

TEMPLATE = Path(__file__).with_name("dashboard.html.j2")
WIDTH, HEIGHT = 360, 190  # units of a line chart
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 24
POINTS = 150  # of a line; more are averaged in equal stretches of steps
BAR = 1000  # units of a bar's axis from 0 to 1
DASHES = ("", "7 3", "2 2")


class Config(ReportConfig):
    gpus: dict[str, int] = key({}, help="cards of one job of each stage/method, for GPU-hours")
    measured: tuple[str, ...] = key((), help="<stage>/<method>/<variant> of everything that ends in a number")


class Line(NamedTuple):
    """One job's metric over steps: its name, colour and dash, and lists of steps, means over seeds, lowest, highest."""

    name: str
    colour: str
    dash: str
    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


# --- drawing ----------------------------------------------------------------------------------------------------


def thin(steps: list[float], values: list[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most `points` of a series: means over stretches of equally many points. Short series stay as they are."""
    size = math.ceil(len(steps) / points)
    cut = [slice(i, i + size) for i in range(0, len(steps), size)]
    return tuple([sum(found[one]) / len(found[one]) for one in cut] for found in (steps, values))


def axis(low: float, high: float) -> list[float]:
    """Three to six round numbers, the first not above `low`, the last not below `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    size = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 4)
    return [float(f"{i * step:.10g}") for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def chart(title: str, lines: list[Line]) -> dict[str, Any]:
    """Coordinates of a line chart for the template; the band is the range over seeds."""
    steps = [step for line in lines for step in line.steps]
    values = [value for line in lines for part in (line.low, line.high) for value in part]
    left, right, marks = min(steps), max(steps), axis(min(values), max(values))
    low, high = marks[0], marks[-1]
    right = right if right > left else left + 1

    def x(value: float) -> float:
        return round(LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def path(xs: Iterable[float], ys: Iterable[float]) -> str:
        return " ".join(f"{x(a):g},{y(b):g}" for a, b in zip(xs, ys, strict=True))

    drawn = [
        {
            "name": line.name,
            "colour": line.colour,
            "dash": line.dash,
            "points": path(line.steps, line.mean),
            "band": path([*line.steps, *reversed(line.steps)], [*line.low, *reversed(line.high)])
            if line.low != line.high
            else "",
            "dot": (x(line.steps[-1]), y(line.mean[-1])) if len(line.steps) == 1 else None,
        }
        for line in lines
    ]
    return {
        "title": title,
        "lines": drawn,
        "x": [(x(tick), f"{tick:,g}") for tick in ticks(left, right)],
        "y": [(y(tick), f"{tick:g}".replace("-", "−")) for tick in marks],
        "label": f"{title}, at the end: " + ", ".join(f"{line.name} {line.mean[-1]:.3g}" for line in lines),
    }


# --- series -----------------------------------------------------------------------------------------------------


WITHOUT_TASKS = {"base/scratch": "Base models", "midtrain/prism": "Mid-training"}


def finished(data: Artifacts, reference: str) -> bool:
    """Whether every seed of a job has its result."""
    return all(data.path(reference, seed).is_file() for seed in data.seeds)


def jobs(data: Artifacts, kind: str, measured: tuple[str, ...] = ()) -> dict[str, list[tuple[str, str, str, str]]]:
    """Heading -> (reference, name, colour, dash) of the finished jobs of a stage/method that the study's results rest on."""
    found: dict[str, list[tuple[str, str, str, str]]] = {}
    if kind in WITHOUT_TASKS:
        wanted = tuple(kind.split("/"))
        models = sorted({path.parts[-3] for path in reachable(data, roots(data, measured)) if path.parts[-5:-3] == wanted})
        looks = [(model, COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % 3]) for i, model in enumerate(models)]
        rows = [(f"{kind}/{name}", name, colour, dash) for name, colour, dash in looks if finished(data, f"{kind}/{name}")]
        return {WITHOUT_TASKS[kind]: rows} if rows else {}
    for task in data.tasks:
        names = data.arms if kind == "sft/train" else data.starts
        rows = [
            (f"{kind}/{task}-{name}", name, data.colour(name), DASHES[data.starts.index(name) % 3])
            for name in names
            if finished(data, f"{kind}/{task}-{name}")
        ]
        if rows:
            found[f"{'SFT' if kind == 'sft/train' else 'RL'}, task {task}"] = rows
    return found


def line(data: Artifacts, job: tuple[str, str, str, str], metric: str) -> Line | None:
    reference, name, colour, dash = job
    kept = all("history.jsonl" in data.manifest(reference, seed).artifacts for seed in data.seeds)
    curve = data.curve(reference, metric) if kept else None
    if curve is None:
        return None
    steps, values = curve
    parts = [thin([float(s) for s in steps], [float(v) for v in part]) for part in (values.mean(0), values.min(0), values.max(0))]
    return Line(name, colour, dash, parts[0][0], *(part[1] for part in parts))


def histories(data: Artifacts, section: Section, measured: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Groups of charts: one per kind of job and task, with the legend that its charts share, and what nobody logged."""
    found = []
    for kind in section.jobs:
        for heading, rows in jobs(data, kind, measured).items():
            charts, absent, constant = [], [], []
            for panel in section.panels:
                lines = [one for metric in panel.metrics for job in rows if (one := line(data, job, metric))]
                flat = {value for one in lines for part in (one.low, one.high) for value in part}
                if len(flat) == 1:  # clipping that never happened needs no picture
                    constant.append(f"{panel.title.lower()} {flat.pop():g}")
                elif lines:
                    charts.append(chart(panel.title, lines))
                else:
                    absent += [f"{name}{f' (logged if {panel.only_if})' if panel.only_if else ''}" for name in panel.metrics]
            drawn = {one["name"] for shown in charts for one in shown["lines"]}
            legend = [{"name": row[1], "colour": row[2], "dash": row[3]} for row in rows if row[1] in drawn]
            found.append({"heading": heading, "legend": legend, "charts": charts, "absent": absent, "constant": constant})
    return found


# --- evaluation -------------------------------------------------------------------------------------------------


def parent(checkpoint: str) -> str | None:
    """The checkpoint that this one was trained from; None for the base."""
    stage, _, start = checkpoint.partition("_")
    if not start:
        return None
    return f"sft_{start}" if stage == "rl" and start != BASE else BASE


def share(found: tuple[float, float, float]) -> dict[str, str]:
    return {"value": number(found[0]), "interval": f"[{number(found[1])}, {number(found[2])}]"}


def change(data: Artifacts, task: str, checkpoint: str, other: str | None, k: int) -> dict[str, Any] | None:
    """pass@k of a checkpoint minus another's, item by item; `class` says on which side of zero its interval lies."""
    if other is None or not finished(data, f"evaluate/reasoning/{task}-{other}"):
        return None
    pairs = zip(data.passes(task, checkpoint, k), data.passes(task, other, k), strict=True)
    found = interval([mine - theirs for mine, theirs in pairs])
    side = "worse" if found.high < 0 else "better" if found.low > 0 else ""
    return {**share(found), "estimate": found.estimate, "class": side}


def evaluations(data: Artifacts, section: Section) -> list[dict[str, Any]]:
    """Per task: bars of every checkpoint, and its changes, regressions first."""
    found = []
    for task in data.tasks:
        names = list(dict.fromkeys(name for start in data.starts for name in data.checkpoints(start)))
        colours = {name: data.colour(start) for start in data.starts for name in data.checkpoints(start)}
        names = [name for name in names if finished(data, f"evaluate/reasoning/{task}-{name}")]
        if not names:
            continue
        asked = sorted(data.manifest(f"evaluate/reasoning/{task}-{names[0]}", data.seeds[0]).config["k"])
        wanted = {metric: int(metric.partition("@")[2]) for panel in section.panels for metric in panel.metrics}
        ks = {metric: k for metric, k in wanted.items() if k in asked}
        passes = {metric: {name: interval(data.passes(task, name, k), share=True) for name in names} for metric, k in ks.items()}
        bars = [
            {
                "title": metric,
                "rows": [
                    {"name": name, "colour": colours[name], "after": name.startswith("rl_"), **share(one)}
                    | {"places": [round(value * BAR) for value in one]}
                    for name, one in passes[metric].items()
                ],
            }
            for panel in section.panels
            if panel.kind == "bar"
            for metric in panel.metrics
            if metric in ks
        ]
        rows = []
        for name in names:
            if parent(name):
                others = (parent(name), BASE)
                changes = {metric: [change(data, task, name, other, k) for other in others] for metric, k in ks.items()}
                rows.append({"name": name, "parent": parent(name), "colour": colours[name], "changes": changes})
        rows.sort(key=order)
        absent = [metric for metric in wanted if metric not in ks]
        found.append({"heading": f"Task {task}", "bars": bars, "metrics": list(ks), "rows": rows, "absent": absent})
    return found


def order(row: dict[str, Any]) -> tuple[int, float]:
    """Checkpoints with a regression first, then by the smallest change of the first metric."""
    every = [one for changes in row["changes"].values() for one in changes if one]
    first = [one["estimate"] for one in next(iter(row["changes"].values()), []) if one]
    return (-any(one["class"] == "worse" for one in every), min(first, default=0.0))


# --- cost -------------------------------------------------------------------------------------------------------


def roots(data: Artifacts, measured: tuple[str, ...]) -> list[Path]:
    """The study's own results that have been made so far."""
    kinds = [f"sft/train/{task}-{arm}" for task in data.tasks for arm in data.arms]
    kinds += [f"rl/grpo/{task}-{start}" for task in data.tasks for start in data.starts]
    kinds += [
        f"evaluate/{method}/{task}-{name}"
        for method in ("reasoning", "retention")
        for task in data.tasks
        for start in data.starts
        for name in data.checkpoints(start)
    ]
    return [
        path for kind in dict.fromkeys((*kinds, *measured)) for seed in data.seeds if (path := data.path(kind, seed)).is_file()
    ]


def cost(data: Artifacts, gpus: dict[str, int], measured: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Sums per stage and method, then of all, as hours. GPU-hours: wall time times cards, of jobs that ran on cards."""
    sums: dict[str, list[float]] = {}
    for path in reachable(data, roots(data, measured)):
        beside = path.parent / "provenance.json"
        if not beside.is_file():
            continue
        kind, took = "/".join(path.parts[-5:-3]), json.loads(beside.read_text(encoding="utf-8"))
        wall, cards = took["wall_seconds"] / 3600, gpus.get(kind, 0) if data.read(path).device != "cpu" else 0
        for name in (kind, "total"):
            row = sums.setdefault(name, [0, 0.0, 0.0, 0.0, 0.0])
            row[:4] = [row[0] + 1, row[1] + wall, row[2] + took.get("cpu_seconds", 0.0) / 3600, row[3] + wall * cards]
            row[4] = max(row[4], took["peak_memory_mb"])
    total = sums.pop("total", None)
    rows = [*sorted(sums.items()), *([("total", total)] if total else [])]
    names = ("jobs", "wall", "cpu", "gpu", "memory")
    digits = (0, 3, 3, 3, 0)
    return [{"name": name, **{n: number(v, d) for n, v, d in zip(names, row, digits, strict=True)}} for name, row in rows]


def pending(data: Artifacts) -> list[str]:
    """Training and evaluation jobs of the study without a result for every seed."""
    wanted = [f"sft/train/{task}-{arm}" for task in data.tasks for arm in data.arms]
    wanted += [f"rl/grpo/{task}-{start}" for task in data.tasks for start in data.starts]
    names = dict.fromkeys(name for start in data.starts for name in data.checkpoints(start))
    wanted += [f"evaluate/reasoning/{task}-{name}" for task in data.tasks for name in names]
    return [reference for reference in wanted if not finished(data, reference)]


def main(job: Config) -> None:
    from jinja2 import Environment, StrictUndefined

    data = Artifacts(job)
    draw = {
        "history": lambda section: histories(data, section, job.measured),
        "manifest": lambda section: evaluations(data, section),
        "provenance": lambda _section: cost(data, job.gpus, job.measured),
    }
    sections = [
        {
            "name": one.name,
            "anchor": one.name.lower().replace(" ", "-"),
            "source": one.source,
            "found": draw[one.source](one),
        }
        for one in SECTIONS
    ]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        tier=job.root.name,
        seeds=job.seeds,
        sections=sections,
        pending=pending(data),
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        top=TOP,
        bottom=BOTTOM,
        bar=BAR,
        points=POINTS,
    )
    manifest.write_atomically(job.output, text)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
