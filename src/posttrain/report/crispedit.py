"""CrispEdit's plots: drift against paraphrase over gamma, what each editor reaches and damages, refusals before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import cli
from posttrain.core.stats import bootstrap
from posttrain.report import drawing
from posttrain.report.artifacts import COLOURS, INK, MUTED, PAPER, Artifacts, ReportConfig
from posttrain.report.drawing import SMALL, canvas, label_points, note, over_seeds

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

LABELS = {  # arm -> name on the plot; the family before the first comma has one colour
    "ft": "fine-tuning",
    "random": "random subspace, γ .9",
    "crisp": "CrispEdit, γ .9",
    "crisp_999": "CrispEdit, γ .999",
    "step_50": "CrispEdit step, γ .5",
    "step": "CrispEdit step, γ .9",
    "step_99": "CrispEdit step, γ .99",
    "step_999": "CrispEdit step, γ .999",
    "a_only_70": "activations only, γ .7",
    "a_only_90": "activations only, γ .9",
    "a_only_99": "activations only, γ .99",
    "lora": "LoRA",
    "least_squares": "least squares",
    "seq": "CrispEdit-Seq, γ .9",
    "seq_mix": "CrispEdit-Seq, recomputed",
}
FAMILIES = tuple(dict.fromkeys(label.split(",")[0] for label in LABELS.values()))
LINES = {
    "CrispEdit step": ("step_50", "step", "step_99", "step_999"),
    "activations only": ("a_only_90", "a_only_99"),
}
TASKS = {  # task -> what is edited; those of SEEDED have a model of each seed
    "world": "a from-scratch world",
    "codes": "a mid-trained model",
    "countries": "SmolLM2 (seed 0)",
    "zsre": "ZsRE",
    "counterfact": "CounterFact",
    "wikibigedit": "WikiBigEdit",
    "zsre10k": "ZsRE, 10,000 edits",
    "qwen25": "ZsRE, Qwen2.5",
}
SEEDED = ("world", "codes")


class Config(ReportConfig):
    """Keys of the plots; --output is one of the files, the others lie beside it."""


def colour(arm: str) -> str:
    family = LABELS[arm].split(",")[0]
    return MUTED if family == "fine-tuning" else COLOURS[(FAMILIES.index(family) - 1) % len(COLOURS)]


def reference(task: str, arm: str) -> str:
    return f"edit/{'crispedit' if task in SEEDED else 'pretrained'}/{task}_{arm}"


def seeds(data: Artifacts, task: str) -> tuple[int, ...]:
    """Edits of a pretrained model lie under seed 0 alone."""
    return tuple(data.seeds) if task in SEEDED else (0,)


def arms(data: Artifacts, task: str) -> list[str]:
    """Arms of LABELS that every seed has for a task."""
    return [arm for arm in LABELS if all(data.path(reference(task, arm), seed).is_file() for seed in seeds(data, task))]


def column(data: Artifacts, task: str, arm: str, file: str, name: str, source: str | None = None) -> list[np.ndarray]:
    """One array per seed of a column of edits.parquet or drift.parquet; rows that lack it are left out."""
    import numpy as np

    found = []
    for seed in seeds(data, task):
        rows = data.rows(data.path(reference(task, arm), seed), file)
        kept = [row for row in rows if row[name] is not None and (source is None or row["source"] == source)]
        found.append(np.array([row[name] for row in kept], dtype=float))
    return found


def mean(values: list[np.ndarray]) -> float:
    return sum(float(v.mean()) for v in values) / len(values)


def crispedit_frontier(data: Artifacts, task: str) -> Figure:
    """Drift of capability against accuracy on paraphrases, a line over gamma per subspace."""
    found = arms(data, "world")
    if not found:
        return note(task, "No edit of the from-scratch world was made.")
    text = (
        f"From-scratch world, {over_seeds(data)}; thin dots are seeds. Drift is KL(base || edited) per token on fresh Markov text. Lower right is "
        "better; every arm has the same stopping rule."
    )
    figure, (axis,) = canvas("Capability drift against generality", text, 3.6, left=0.9, right=0.4)
    points, places = [], {}
    for arm in found:
        kl = column(data, "world", arm, "drift.parquet", "kl", "markov")
        right = column(data, "world", arm, "edits.parquet", "paraphrase")
        places[arm] = (mean(right), max(mean(kl), 1e-7))
        axis.plot([v.mean() for v in right], [max(v.mean(), 1e-7) for v in kl], "o", color=colour(arm), markersize=2.5, alpha=0.5)
        axis.plot(*places[arm], "o", color=colour(arm), markersize=7, zorder=3)
        points.append((*places[arm], LABELS[arm], colour(arm)))
    for names in LINES.values():
        line = [places[arm] for arm in names if arm in places]
        if len(line) > 1:
            axis.plot(*zip(*line, strict=True), color=colour(names[0]), linewidth=1.3, zorder=2)
    axis.set(xlabel="Paraphrase accuracy", ylabel="Drift (nats per token)", yscale="log")
    axis.margins(0.12)
    label_points(axis, points, list(places.values()))
    return figure


def crispedit_arms(data: Artifacts, task: str) -> Figure:
    """Efficacy, paraphrase, locality and drift of every arm, a block per task."""
    tasks = [name for name in TASKS if arms(data, name)]
    if not tasks:
        return note(task, "No arm of these plots was run.")
    panels = (
        ("edits.parquet", "free", "Free answer right"),
        ("edits.parquet", "paraphrase", "Paraphrase"),
        ("edits.parquet", "locality", "Locality"),
        ("drift.parquet", "kl", "Drift (nats per token)"),
    )
    rows = [(name, arm) for name in tasks for arm in arms(data, name)]
    text = f"{over_seeds(data).capitalize()}, 95% intervals. Locality is agreement with the unedited model. γ as edit.yaml has it where none is given. From above: {', '.join(TASKS[name] for name in tasks)}."
    figure, axes = canvas("Editors", text, 0.24 * len(rows) + 0.3, columns=4, left=1.95, right=0.2, gap=0.2, top=0.3)
    for axis, (file, name, title) in zip(axes, panels, strict=True):
        for row, (source, arm) in enumerate(rows):
            values = column(data, source, arm, file, name)
            if not all(len(v) for v in values):
                continue
            estimate, low, high = bootstrap(values, resamples=1000)
            if name == "kl":
                low, estimate, high = (max(v, 1e-7) for v in (low, estimate, high))
            axis.plot([low, high], [row, row], color=colour(arm), linewidth=1.5)
            axis.plot(estimate, row, "o", color=colour(arm), markersize=5)
        axis.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)))
        axis.set_yticklabels([LABELS[arm].removesuffix(", γ .9") for _, arm in rows] if axis is axes[0] else [], fontsize=8)
        axis.set_title(title, fontsize=SMALL, loc="left", color=INK)
        axis.grid(axis="y", visible=False)
        if name == "kl":
            axis.set_xscale("log")
        else:
            axis.set_xlim(-0.03, 1.03)
        for count in range(1, len(tasks)):
            axis.axhline(sum(len(arms(data, name)) for name in tasks[:count]) - 0.5, color=MUTED, linewidth=0.8)
    return figure


def crispedit_refusals(data: Artifacts, task: str) -> Figure:
    """Refusals of edited requests, of held-out wordings and of harmless look-alikes, before and after."""
    found = arms(data, "safety")
    if not found:
        return note(task, "No refusal was edited in.")
    kinds = {"refusal": "edited requests", "refusal_paraphrase": "held-out wordings", "over_refusal": "harmless look-alikes"}
    count = len(column(data, "safety", found[0], "edits.parquet", "refusal")[0])
    text = (
        f"Share of responses that decline, counted by words, {count} requests of our own each, seed 0. Hollow: before the edit."
    )
    figure, axes = canvas("Refusing as an edit", text, 0.35 * len(found) + 0.2, columns=3, left=1.5, right=0.3, gap=0.25, top=0.3)
    for axis, (name, title) in zip(axes, kinds.items(), strict=True):
        for row, arm in enumerate(found):
            before, after = (column(data, "safety", arm, "edits.parquet", f"{b}{name}") for b in ("before_", ""))
            estimate, low, high = bootstrap(after, resamples=1000)
            axis.plot([max(low, 0), min(high, 1)], [row, row], color=colour(arm), linewidth=1.5)
            axis.plot(mean(before), row, "o", color=colour(arm), markerfacecolor=PAPER, markersize=6)
            axis.plot(estimate, row, "o", color=colour(arm), markersize=6)
        axis.set(ylim=(len(found) - 0.5, -0.5), xlim=(-0.04, 1.04), yticks=range(len(found)))
        axis.set_yticklabels([LABELS[arm] for arm in found] if axis is axes[0] else [])
        axis.set_title(title, fontsize=SMALL, loc="left", color=INK)
        axis.grid(axis="y", visible=False)
    return figure


PLOTS = (crispedit_frontier, crispedit_arms, crispedit_refusals)


def main(job: Config) -> None:
    drawing.write(PLOTS, Artifacts(job), ("crispedit",), job.folder)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
