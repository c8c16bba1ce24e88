"""D³'s plots: the exact test bed, loss and skill by schedule on the planted world, one window's influence graph and order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import cli
from posttrain.core.stats import bootstrap
from posttrain.report import drawing
from posttrain.report.artifacts import COLOURS, INK, MUTED, PAPER, Artifacts, ReportConfig
from posttrain.report.drawing import SMALL, canvas, label_ends, note, over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TESTBED, WORLD = "midtrain/testbed/uniform", "chain"
SCHEDULES = ("random", "d3", "d3_reversed", "easy_first", "hard_first", "skill_it", "doremi", "grab")
METHODS = {
    "random": "random (exact mean)",
    "lop_d": "D³, exact order",
    "score_d": "D³, heuristic",
    "pair_exact": "pairs tried out",
    "reversed_lop_d": "D³ reversed",
    "easy_first": "easy first",
    "hard_first": "hard first",
}


class Config(ReportConfig):
    """Keys of the plots; --output is one of the files, the others lie beside it."""


def colour(schedule: str) -> str:
    return MUTED if schedule == "random" else COLOURS[SCHEDULES.index(schedule) - 1]


def schedules(data: Artifacts) -> list[str]:
    """Schedules of SCHEDULES that every seed has on the planted world."""
    return [s for s in SCHEDULES if all(data.path(f"midtrain/d3/{WORLD}_{s}", seed).is_file() for seed in data.seeds)]


def d3_testbed(data: Artifacts, task: str) -> Figure:
    """Regret of each method's order on quadratic problems, by step size."""
    import numpy as np

    path = data.path(TESTBED, 0)
    if not path.is_file():
        return note(task, "The test bed was not run.")
    rows = data.rows(path, "regrets.parquet")
    etas = sorted({row["eta"] for row in rows})
    count = len({row["problem"] for row in rows})
    text = f"Regret of an order: 0 the best of all orders, 1 the worst. Mean over {count} problems, 95% intervals over problems."
    figure, (axis,) = canvas("Exact test bed", text, 0.3 * len(METHODS), left=1.7)
    for row, method in enumerate(METHODS):
        for shift, (eta, ink) in enumerate(zip(etas, COLOURS, strict=False)):
            values = np.array([r[method] for r in rows if r["eta"] == eta])
            estimate, low, high = bootstrap([values], resamples=1000)
            place = row + 0.22 * (shift - (len(etas) - 1) / 2)
            axis.plot([low, high], [place, place], color=ink, linewidth=1.4)
            axis.plot(estimate, place, "o", color=ink, markersize=4.5, label=f"step size {eta:g}" if row == 0 else None)
    axis.set_yticks(range(len(METHODS)), METHODS.values())
    axis.set(ylim=(len(METHODS) - 0.5, -0.5), xlim=(-0.02, 1.0), xlabel="Regret")
    axis.grid(axis="y", visible=False)
    axis.legend(frameon=False, fontsize=SMALL, loc="lower right")
    return figure


def d3_curves(data: Artifacts, task: str) -> Figure:
    """Validation loss over steps, and the step at which the last skill is right on nine of ten, by schedule."""
    import numpy as np

    found = schedules(data)
    if not found:
        return note(task, "No schedule was run on the planted world.")
    first = data.rows(data.path(f"midtrain/d3/{WORLD}_{found[0]}", data.seeds[0]), "replicates.parquet")
    text = f"Planted prerequisites, {len(first)} paired replicates per seed, {over_seeds(data)}. Right: dots are replicates, hollow: never."
    height = 2.7
    figure, axes = canvas("Schedules of the same units", text, height, columns=2, right=0.2, gap=2.2)
    ends = []
    for row, schedule in enumerate(found):
        reference = f"midtrain/d3/{WORLD}_{schedule}"
        by_step: dict[int, list[float]] = {}
        reached, censored = [], []
        for seed in data.seeds:
            for point in data.rows(data.path(reference, seed), "curves.parquet"):
                by_step.setdefault(point["step"], []).append(point["loss"])
            for one in data.rows(data.path(reference, seed), "replicates.parquet"):
                (censored if one["censored"] else reached).append(one["steps_to_90"])
        steps = sorted(by_step)
        means = [float(np.mean(by_step[s])) for s in steps]
        axes[0].plot(steps, means, color=colour(schedule), linewidth=1.8, linestyle="--" if schedule == "random" else "-")
        ends.append((steps[-1], means[-1], schedule, colour(schedule)))
        axes[1].plot(reached, [row] * len(reached), "o", color=colour(schedule), markersize=3.5, alpha=0.6)
        axes[1].plot(censored, [row] * len(censored), "o", color=colour(schedule), markerfacecolor=PAPER, markersize=4)
        axes[1].plot(np.mean(reached + censored), row, "|", color=INK, markersize=14)
    axes[0].set(xlabel="Step", ylabel="Validation loss (nats)")
    label_ends(axes[0], ends, height)
    axes[1].set_yticks(range(len(found)), found)
    axes[1].set(ylim=(len(found) - 0.5, -0.5), xlabel="Step of 90% on the last skill")
    axes[1].grid(axis="y", visible=False)
    return figure


def d3_graph(data: Artifacts, task: str) -> Figure:
    """The directed influence of one window: its matrix, and the edges above noise with the order that was chosen."""
    import numpy as np

    reference = f"midtrain/d3/{WORLD}_d3"
    if not data.available([reference]):
        return note(task, "D³ was not run on the planted world.")
    path = data.path(reference, data.seeds[0])
    rows = [row for row in data.rows(path, "influence.parquet") if row["replicate"] == 0 and row["edge"] == "raw_fd"]
    if not rows:
        return note(task, "The influence raw_fd was not measured.")
    windows = sorted({row["window"] for row in rows})
    window = windows[len(windows) // 4]
    rows = [row for row in rows if row["window"] == window]
    n = 1 + max(row["i"] for row in rows)
    matrix, error = np.zeros((n, n)), np.zeros((n, n))
    for row in rows:
        matrix[row["i"], row["j"]], error[row["i"], row["j"]] = row["D"], row["se_D"]
    (order,) = [r["order"] for r in data.rows(path, "orders.parquet") if r["replicate"] == 0 and r["window"] == window]
    chosen = [unit % n for unit in order]
    text = (
        f"Seed {data.seeds[0]}, replicate 0, window {window}. D > 0: training on the row's unit helps the column's more than the other "
        f"way round. Edges are those above one standard error. Order chosen: {' → '.join(str(u + 1) for u in chosen)}."
    )
    figure, axes = canvas("Influence graph and order", text, 2.7, columns=2, gap=0.9)
    reach = float(np.abs(matrix).max()) or 1.0
    axes[0].imshow(matrix, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
    for i in range(n):
        for j in range(n):
            if i != j:
                ink = PAPER if abs(matrix[i, j]) > 0.6 * reach else "#1f2329"
                axes[0].text(j, i, f"{1000 * matrix[i, j]:.1f}", ha="center", va="center", fontsize=8, color=ink)
    names = [f"skill {k + 1}" for k in range(n)]
    axes[0].set_xticks(range(n), names, fontsize=8)
    axes[0].set_yticks(range(n), names, fontsize=8)
    axes[0].set_xlabel("D in thousandths of a nat")
    axes[0].grid(visible=False)
    places = {unit: np.array([position, 0.0]) for position, unit in enumerate(chosen)}
    for i in range(n):
        for j in range(n):
            if matrix[i, j] > error[i, j] and i != j:
                forward = places[i][0] < places[j][0]
                style = f"arc3,rad={-0.45 if forward else 0.45}"
                ink = COLOURS[2] if forward else COLOURS[4]
                axes[1].annotate(
                    "",
                    places[j],
                    places[i],
                    arrowprops={"arrowstyle": "->", "color": ink, "connectionstyle": style, "shrinkA": 11, "shrinkB": 11},
                )
    for unit, place in places.items():
        axes[1].plot(*place, "o", color=PAPER, markeredgecolor=INK, markersize=18)
        axes[1].text(*place, str(unit + 1), ha="center", va="center")
    axes[1].set(
        xlim=(-0.6, n - 0.4),
        ylim=(-1.3, 1.3),
        xticks=range(n),
        yticks=[],
        xlabel="Place in the order (green: kept edges, red: broken)",
    )
    axes[1].set_xticklabels([str(k + 1) for k in range(n)])
    axes[1].grid(visible=False)
    return figure


PLOTS = (d3_testbed, d3_curves, d3_graph)


def main(job: Config) -> None:
    drawing.write(PLOTS, Artifacts(job), ("d3",), job.folder)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
