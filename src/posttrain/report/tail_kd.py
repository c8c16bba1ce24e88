"""TAD's plots: KL and its parts by arm on known sources, K against beta, probability by rank, arms on real text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import cli
from posttrain.core.stats import bootstrap
from posttrain.report import drawing
from posttrain.report.artifacts import COLOURS, INK, MUTED, PAPER, Artifacts, ReportConfig
from posttrain.report.drawing import SMALL, canvas, label_ends, note, over_seeds

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

GRID = "distill/grid/known"
ARMS = {  # arm of distill/known -> label, in the order of the plot
    "clm": "no teacher",
    "kd": "KL",
    "kd_weight3": "KL, weight 3",
    "kd_weight10": "KL, weight 10",
    "kd_pure": "KL alone",
    "dkd": "DKD",
    "rkl": "reverse KL",
    "jsd": "JSD",
    "topk_only": "top K only",
    "tad_b1": "TAD β = 1",
    "tad": "TAD",
    "tad_pure": "TAD alone",
    "tad_b10": "TAD β = 10",
    "tad_k1": "TAD K = 1",
    "tad_constant": "TAD, constant β",
    "kd_long": "KL, 5× steps",
    "tad_long": "TAD, 5× steps",
    "kd_wide": "KL, wide student",
    "tad_wide": "TAD, wide student",
}
SHOWN = ("clm", "kd", "topk_only", "tad")  # by rank
TASK, TEXT = "prose", ("clm", "kd", "kd_weight3", "tad")


class Config(ReportConfig):
    """Keys of the plots; --output is one of the files, the others lie beside it."""


def colour(arm: str) -> str:
    """The same for an arm in every plot; no teacher is grey."""
    if arm == "clm":
        return MUTED
    if arm == "kd_weight3":
        return COLOURS[3]
    return COLOURS[0] if arm.startswith("kd") else COLOURS[1] if arm.startswith("tad") else COLOURS[2]


def have(data: Artifacts, method: str, arms) -> list[str]:
    """Arms that every seed has."""
    return [arm for arm in arms if all(data.path(f"distill/{method.format(arm)}", seed).is_file() for seed in data.seeds)]


def replicates(data: Artifacts, arm: str, names: tuple[str, ...], rate: str = "own") -> np.ndarray:
    """float64 [seeds x replicates, names] of an arm on known sources."""
    import numpy as np

    rows = [
        row
        for seed in data.seeds
        for row in data.rows(data.path(f"distill/known/{arm}", seed), "replicates.parquet")
        if row["rate"] == rate
    ]
    return np.array([[row[name] for name in names] for row in rows])


def tail_kd_arms(data: Artifacts, task: str) -> Figure:
    """Forward KL of each arm on known sources, as head (KL1) and tail (alpha KL2), and the student's tail mass."""
    found = have(data, "known/{}", ARMS)
    if not found:
        return note(task, "No arm was trained on known sources.")
    text = (
        f"Exact teacher, learning rate chosen per arm (0.01 where steps are 5×), {over_seeds(data)}. Left: KL(teacher ∥ student) in nats, dark the head with the "
        "tail as one class (KL1), light the tail's shape (α KL2); dots are replicates. Right: student's mass beyond the teacher's ten most likely tokens; line: the teacher's."
    )
    figure, axes = canvas("Forward KL by loss", text, 0.26 * len(found), columns=2, left=1.55, gap=0.35)
    truth = []
    for row, arm in enumerate(found):
        values = replicates(data, arm, ("kl", "kl1", "alpha_s", "alpha_t"))
        kl, kl1, tail, teacher = values.mean(0)
        truth.append(teacher)
        axes[0].barh(row, kl1, color=colour(arm), height=0.6)
        axes[0].barh(row, kl - kl1, left=kl1, color=colour(arm), height=0.6, alpha=0.4)
        axes[0].plot(values[:, 0], [row] * len(values), "o", color=INK, markersize=2.5, alpha=0.6)
        axes[1].plot(values[:, 2], [row] * len(values), "o", color=colour(arm), markersize=3, alpha=0.5)
        axes[1].plot(tail, row, "|", color=INK, markersize=11)
    axes[1].axvline(sum(truth) / len(truth), color=MUTED, linewidth=1)
    axes[0].set(ylim=(len(found) - 0.5, -0.5), xlabel="KL (nats)")
    axes[1].set(ylim=(len(found) - 0.5, -0.5), xlabel="Tail mass of the student")
    axes[0].set_yticks(range(len(found)), [ARMS[arm] for arm in found])
    axes[1].set_yticks(range(len(found)), [])
    for axis in axes:
        axis.grid(axis="y", visible=False)
    return figure


def tail_kd_grid(data: Artifacts, task: str) -> Figure:
    """K against beta: forward KL and KL2 in each cell."""
    import numpy as np

    if not data.available([GRID]):
        return note(task, "K and beta were not varied.")
    rows = [row for seed in data.seeds for row in data.rows(data.path(GRID, seed), "grid.parquet")]
    plain = {name: np.mean([row[name] for row in rows if row["kind"] == "kl"]) for name in ("kl", "kl2")}
    cells = [row for row in rows if row["kind"] == "tad"]
    ks, betas = (sorted({row[name] for row in cells}) for name in ("k", "beta"))
    text = (
        f"Known sources, one learning rate for all cells, {over_seeds(data)}. Plain KL: {plain['kl']:.3f} and {plain['kl2']:.2f}."
    )
    figure, axes = canvas("K against β", text, 0.36 * len(ks), columns=2, gap=0.8, top=0.3)
    for axis, (name, label, digits) in zip(axes, (("kl", "Forward KL (nats)", 3), ("kl2", "KL2 (nats)", 2)), strict=True):
        table = np.array([[np.mean([r[name] for r in cells if (r["k"], r["beta"]) == (k, b)]) for b in betas] for k in ks])
        axis.imshow(table, cmap="Blues", aspect="auto")
        dark = (table.min() + table.max()) / 2
        for y, line in enumerate(table):
            for x, value in enumerate(line):
                ink = PAPER if value > dark else INK
                axis.text(x, y, f"{value:.{digits}f}", ha="center", va="center", fontsize=8.5, color=ink)
        axis.set_xticks(range(len(betas)), [f"{b:g}" for b in betas])
        axis.set_yticks(range(len(ks)), [str(k) for k in ks])
        axis.set(xlabel="β", ylabel="K")
        axis.set_title(label, fontsize=SMALL, loc="left", color=INK)
        axis.grid(visible=False)
    return figure


def tail_kd_ranks(data: Artifacts, task: str) -> Figure:
    """The student's probability over the teacher's, by the teacher's rank, on known sources."""
    import numpy as np

    found = have(data, "known/{}", SHOWN)
    if not found:
        return note(task, "No arm was trained on known sources.")
    text = f"Known sources, learning rate chosen per arm, {over_seeds(data)}. 1: as much probability as the teacher gives these ranks."
    height = 2.5
    figure, (axis,) = canvas("Probability by the teacher's rank", text, height, right=1.6)
    ends = []
    for arm in found:
        sums: dict[tuple[int, int], list[float]] = {}
        for seed in data.seeds:
            for row in data.rows(data.path(f"distill/known/{arm}", seed), "buckets.parquet"):
                if row["rate"] == "own":
                    pair = sums.setdefault((row["low"], row["high"]), [0.0, 0.0])
                    pair[0], pair[1] = pair[0] + row["teacher"], pair[1] + row["student"]
        ranks = sorted(sums)
        places = [np.sqrt((low + 1) * high) for low, high in ranks]
        ratio = [sums[rank][1] / sums[rank][0] for rank in ranks]
        axis.plot(places, ratio, "o-", color=colour(arm), linewidth=1.8, markersize=3.5)
        ends.append((places[-1], ratio[-1], ARMS[arm], colour(arm)))
    axis.axhline(1, color=MUTED, linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="Rank of the token for the teacher", ylabel="Student's mass / teacher's")
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if axis.get_ylim()[0] <= t <= axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    _label_log(axis, ends, height)
    return figure


def _label_log(axis, ends: list[tuple[float, float, str, str]], height: float) -> None:
    """Direct labels on a logarithmic axis: places are spread in its own unit, decades."""
    import numpy as np

    low, high = np.log10(axis.get_ylim())
    places = drawing.spread([float(np.log10(y)) for _, y, _, _ in ends], (high - low) * 0.2 / height, low, high)
    for (x, y, name, ink), place in zip(ends, places, strict=True):
        arrow = {"arrowstyle": "-", "color": ink, "linewidth": 1.3, "shrinkA": 2, "shrinkB": 1, "relpos": (0, 0.5)}
        where = axis.get_yaxis_transform()
        axis.annotate(name, (x, y), (1.05, 10**place), textcoords=where, va="center", fontsize=SMALL, arrowprops=arrow)


def tail_kd_text(data: Artifacts, task: str) -> Figure:
    """Real text: each arm minus plain KL on the same held-out rows, and the KL of every arm over training."""
    import numpy as np

    found = have(data, f"tail_kd/{TASK}-{{}}", TEXT)
    if "kd" not in found:
        return note(task, "No student was distilled on text.")
    names = {"kl": "forward KL", "kl1": "KL1", "kl2": "KL2", "ce": "cross-entropy"}

    def values(arm: str, name: str) -> list[np.ndarray]:
        paths = [data.path(f"distill/tail_kd/{TASK}-{arm}", seed) for seed in data.seeds]
        return [np.array([row[name] for row in data.rows(path, "rows.parquet")]) for path in paths]

    text = f"A character model of prose, student half as wide, {over_seeds(data)}. Left: minus plain KL on held-out rows, 95% intervals. Right: forward KL on a few held-out rows over training."
    height = 2.4
    figure, axes = canvas("Distillation on text", text, height, columns=2, left=1.2, right=1.3, gap=0.9)
    others = [arm for arm in found if arm not in ("kd", "clm")]
    for shift, arm in enumerate(others):
        for row, name in enumerate(names):
            pairs = zip(values(arm, name), values("kd", name), strict=True)
            estimate, low, high = bootstrap([a - b for a, b in pairs], resamples=1000)
            place = row + 0.22 * (shift - (len(others) - 1) / 2)
            axes[0].plot([low, high], [place, place], color=colour(arm), linewidth=1.4)
            axes[0].plot(estimate, place, "o", color=colour(arm), markersize=4, label=ARMS[arm] if row == 0 else None)
    axes[0].axvline(0, color=MUTED, linewidth=0.8)
    axes[0].set_yticks(range(len(names)), names.values())
    axes[0].set(ylim=(len(names) - 0.5, -0.5), xlabel="Minus plain KL (nats)")
    axes[0].grid(axis="y", visible=False)
    axes[0].legend(frameon=False, fontsize=8)
    ends = []
    for arm in found:
        curve = data.curve(f"distill/tail_kd/{TASK}-{arm}", "fixed/kl")
        if curve is not None:
            axes[1].plot(curve[0], curve[1].mean(0), color=colour(arm), linewidth=1.8)
            ends.append((curve[0][-1], curve[1].mean(0)[-1], ARMS[arm], colour(arm)))
    axes[1].set(xlabel="Step", ylabel="KL (nats)")
    label_ends(axes[1], ends, height)
    return figure


PLOTS = (tail_kd_arms, tail_kd_grid, tail_kd_ranks, tail_kd_text)


def main(job: Config) -> None:
    drawing.write(PLOTS, Artifacts(job), ("tail_kd",), job.folder)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
