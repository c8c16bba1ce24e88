"""Five plots of the study as SVG: RL curves, pass@1 before and after RL, rank reversal, weights, retention.

One panel per task. Text stays text, and the same inputs give the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core import cli
from posttrain.report.artifacts import GRID, INK, MUTED, PAPER, Artifacts, ReportConfig, interval

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "svg.hashsalt": "posttrain",  # ids follow from content alone
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "Verdana", "Arial"],
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
    "figure.facecolor": PAPER,
}
STATISTICS = {"weight_mean": "mean weight", "weight_ess": "effective sample share", "weight_floor": "share at floor"}


class Config(ReportConfig):
    """Keys of the plots; --output is one of the five files, the others lie beside it."""


def panels(rows: int, columns: int, height: float) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def empty(axes: Axes, task: str, text: str) -> None:
    """In place of a panel: why there is none."""
    axes.set_title(task, loc="left", weight="bold")
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED)
    axes.set_axis_off()


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average of [T] values; the window shrinks at both ends, so that no value is invented there."""
    import numpy as np

    reach = np.minimum(np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]), window // 2)
    return np.array([values[i - r : i + r + 1].mean() for i, r in enumerate(reach)])


def legend(figure: Figure, axes: Axes) -> None:
    """One legend below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)


def rl_curves(artifacts: Artifacts) -> Figure:
    """Reward over GRPO steps, mean over seeds; thin: each step, thick: moving average, band: range over seeds."""
    figure, rows = panels(1, len(artifacts.tasks), 4.2)
    for axes, task in zip(rows[0], artifacts.tasks, strict=True):
        if not artifacts.available(f"rl/grpo/{task}-{start}" for start in artifacts.starts):
            empty(axes, task, "no RL on this task")
            continue
        for start in artifacts.starts:
            found = artifacts.curve(f"rl/grpo/{task}-{start}", "reward")
            if found is None:
                continue
            steps, values = found
            colour = artifacts.colour(start)
            window = max(3, len(steps) // 8)
            axes.plot(steps, values.mean(0), color=colour, linewidth=0.7, alpha=0.3)
            axes.plot(
                steps,
                smooth(values.mean(0), window),
                color=colour,
                linewidth=2,
                label=start,
                linestyle="--" if start == "base" else "-",
            )
            if len(values) > 1:
                axes.fill_between(
                    steps, smooth(values.min(0), window), smooth(values.max(0), window), color=colour, alpha=0.1, linewidth=0
                )
        axes.set_title(task, loc="left", weight="bold")
        axes.set(xlabel="GRPO step", ylabel="reward (share of verified answers)", ylim=(0, 1))
    legend(figure, rows[0][0])
    return figure


def before_after(artifacts: Artifacts) -> Figure:
    """pass@1 of each start before (hollow) and after RL (filled), with 95 % intervals."""
    figure, rows = panels(1, len(artifacts.tasks), 3.9)
    for axes, task in zip(rows[0], artifacts.tasks, strict=True):
        if not artifacts.evaluated("reasoning", task):
            empty(axes, task, "not evaluated")
            continue
        for y, start in enumerate(reversed(artifacts.starts)):
            before, after = (interval(artifacts.passes(task, name), share=True) for name in artifacts.checkpoints(start))
            colour = artifacts.colour(start)
            axes.plot([before.estimate, after.estimate], [y, y], color=colour, linewidth=2.5, alpha=0.35, solid_capstyle="butt")
            for shift, one, face in ((0.17, before, PAPER), (-0.17, after, colour)):
                axes.plot([one.low, one.high], [y + shift] * 2, color=colour, linewidth=1.3)
                axes.plot(one.estimate, y + shift, "o", color=colour, markerfacecolor=face, markersize=7)
        axes.set_yticks(range(len(artifacts.starts)), list(reversed(artifacts.starts)))
        axes.grid(axis="y", visible=False)
        axes.set_title(task, loc="left", weight="bold")
        axes.set(xlabel="pass@1 before RL (hollow) and after (filled)", xlim=(-0.02, 1.02))
    return figure


def rank_reversal(artifacts: Artifacts) -> Figure:
    """SFT score against post-RL pass@1: small points are seeds, large ones their mean."""
    arms = [arm for arm in artifacts.arms if not arm.startswith("kl")]
    figure, rows = panels(1, len(artifacts.tasks), 4.2)
    for axes, task in zip(rows[0], artifacts.tasks, strict=True):
        if not artifacts.evaluated("reasoning", task):
            empty(axes, task, "not evaluated")
            continue
        for arm in arms:
            x = [float(values.mean()) for values in artifacts.nll(task, arm)]
            y = [float(values.mean()) for values in artifacts.passes(task, f"rl_{arm}")]
            colour, marker = artifacts.colour(arm), artifacts.marker(arm)
            axes.scatter(x, y, s=18, color=colour, marker=marker, alpha=0.45, linewidths=0)
            axes.scatter(sum(x) / len(x), sum(y) / len(y), s=75, color=colour, marker=marker, label=arm, zorder=3)
        axes.set_title(task, loc="left", weight="bold")
        axes.set(xlabel="validation NLL after SFT, nats per trace (left is better)", ylabel="pass@1 after RL")
        axes.margins(0.12)
    legend(figure, rows[0][0])
    return figure


def weights(artifacts: Artifacts) -> Figure:
    """Statistics of the weights over SFT steps, mean over seeds, for every arm that weighs tokens."""
    figure, rows = panels(len(STATISTICS), len(artifacts.tasks), 2.4)
    for column, task in enumerate(artifacts.tasks):
        for line, (name, title) in enumerate(STATISTICS.items()):
            axes, drawn = rows[line][column], False
            for arm in artifacts.arms:
                reference = f"sft/train/{task}-{arm}"
                found = artifacts.curve(reference, name) if artifacts.available([reference]) else None
                if found is not None:
                    axes.plot(found[0], found[1].mean(0), color=artifacts.colour(arm), linewidth=1.8, label=arm)
                    drawn = True
            if not drawn:
                empty(axes, task, f"no arm logs {title}")
                continue
            axes.set_title(task if line == 0 else "", loc="left", weight="bold")
            axes.set(ylabel=title, ylim=(0, None), xlabel="SFT step" if line == len(STATISTICS) - 1 else "")
    legend(figure, rows[0][0])
    return figure


def retention(artifacts: Artifacts) -> Figure:
    """Loss on held-out real text of every checkpoint; the dashed line is the base model."""
    figure, rows = panels(1, len(artifacts.tasks), 3.9)
    for axes, task in zip(rows[0], artifacts.tasks, strict=True):
        if not artifacts.evaluated("retention", task):
            empty(axes, task, "this base model never saw real text:\nthere is nothing to retain")
            continue
        base = interval(artifacts.bits_per_byte(task, "base")).estimate
        axes.axvline(base, color=MUTED, linestyle="--", linewidth=1.2)
        for y, start in enumerate(reversed(artifacts.starts)):
            for shift, name, filled in zip((0.17, -0.17), artifacts.checkpoints(start), (False, True), strict=True):
                one = interval(artifacts.bits_per_byte(task, name))
                colour = artifacts.colour(start)
                axes.plot([one.low, one.high], [y + shift] * 2, color=colour, linewidth=1.3)
                axes.plot(one.estimate, y + shift, "o", color=colour, markerfacecolor=colour if filled else PAPER, markersize=7)
        axes.set_yticks(range(len(artifacts.starts)), list(reversed(artifacts.starts)))
        axes.grid(axis="y", visible=False)
        axes.set_title(task, loc="left", weight="bold")
        axes.set(xlabel="bits per byte of held-out text, before RL (hollow) and after (filled)")
    return figure


PLOTS = (rl_curves, before_after, rank_reversal, weights, retention)


def main(job: Config) -> None:
    import matplotlib

    matplotlib.use("Agg")
    artifacts = Artifacts(job)
    with matplotlib.rc_context(STYLE):
        for draw in PLOTS:
            path: Path = job.output.parent / f"{draw.__name__}.svg"
            draw(artifacts).savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
