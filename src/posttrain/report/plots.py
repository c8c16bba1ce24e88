"""Five plots of the study as SVG: RL curves, pass@1 before and after RL, rank reversal, weights, retention.

Each file stacks one drawing per task (a nested <svg> whose id is <plot>-<task>), so that the page can show a task's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import cli
from posttrain.core.stats import Interval
from posttrain.report import drawing
from posttrain.report.artifacts import BASE, MUTED, PAPER, Artifacts, ReportConfig, interval
from posttrain.report.drawing import SMALL, WIDTH, canvas, label_ends, label_points, note, over_seeds, smooth

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATISTICS = {
    "weight_mean": "Mean weight",
    "weight_ess": "ESS / tokens",
    "weight_floor": "Share at floor",
    "weight_cap": "Share at cap",
}


class Config(ReportConfig):
    """Keys of the plots; --output is one of the five files, the others lie beside it."""


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


def main(job: Config) -> None:
    data = Artifacts(job)
    drawing.write(PLOTS, data, job.tasks, job.folder)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
