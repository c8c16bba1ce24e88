"""PRISM's plots: retention over mid-training, RL by starting point, the two-by-two of mixes, CKA by layer, the plane between
base, mid and RL, and how prompts that were hard at the start fare over RL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import cli, manifest
from posttrain.core.effects import main_effects
from posttrain.core.errors import UserError
from posttrain.core.stats import bootstrap
from posttrain.report import drawing
from posttrain.report.artifacts import COLOURS, INK, MUTED, PAPER, Artifacts, ReportConfig
from posttrain.report.drawing import SMALL, canvas, label_ends, note, over_seeds, smooth

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

BASE = "prism_base"
STARTS = {"base": BASE, "web": "web", "m": "m", "mc": "mc", "mcs": "mcs"}  # label -> name of the start in rl/grpo
MIDS = ("m", "mc", "mcs", "no_replay", "web")
MIXES = ("mc", "mcs")


class Config(ReportConfig):
    """Keys of the plots; --output is one of the files, the others lie beside it."""


def colour(name: str) -> str:
    """The same for a mix in every plot; the base is grey."""
    return COLOURS[MIDS.index(name)] if name in MIDS else MUTED


def mids(data: Artifacts) -> list[str]:
    """Mid-trained models of MIDS that every seed has."""
    return [name for name in MIDS if all(data.path(f"midtrain/prism/{name}", seed).is_file() for seed in data.seeds)]


def prism_retention(data: Artifacts, task: str) -> Figure:
    """Held-out loss of real text and recall of facts over the steps of mid-training, one line per mix."""
    import numpy as np

    names = mids(data)
    if not names:
        return note(task, "Nothing was mid-trained.")
    panels = {"held_out/prose": "Loss on held-out prose (nats per token)", "fact_recall": "Recall of facts"}
    text = f"Validation split, {over_seeds(data)}, band: lowest to highest seed. Step 0 is the base."
    height = 2.6
    figure, axes = canvas("Retention over mid-training", text, height, columns=2, right=1.1, gap=1.35, top=0.3)
    for axis, (metric, label) in zip(axes, panels.items(), strict=True):
        ends = []
        for name in names:
            reference = f"midtrain/prism/{name}"
            curve, start = data.curve(reference, metric), data.metric(reference, f"before/{metric}")
            if curve is None or start is None:
                continue
            first = [data.manifest(reference, seed).metrics[f"before/{metric}"].value for seed in data.seeds]
            steps = np.concatenate([[0], curve[0]])
            values = np.concatenate([np.array(first)[:, None], curve[1]], 1)
            axis.fill_between(steps, values.min(0), values.max(0), color=colour(name), alpha=0.12, linewidth=0)
            axis.plot(steps, values.mean(0), color=colour(name), linewidth=2)
            ends.append((steps[-1], values.mean(0)[-1], name, colour(name)))
        axis.set(xlabel="Step", title=None)
        axis.set_title(label, fontsize=SMALL, loc="left", color=INK)
        axis.margins(x=0.02)
        label_ends(axis, ends, height)
    return figure


def prism_rl(data: Artifacts, task: str) -> Figure:
    """Reward over GRPO steps by starting point, one panel per RL mix."""
    runs = {mix: {label: f"rl/grpo/prism_{mix}-{start}" for label, start in STARTS.items()} for mix in MIXES}
    if not any(data.available(found.values()) for found in runs.values()):
        return note(task, "No RL run.")
    text = (
        f"Mean reward of each step's completions, moving average over 5 steps, {over_seeds(data)}. Reward only inside the format."
    )
    height = 2.6
    figure, axes = canvas("RL by starting point", text, height, columns=2, right=0.9, gap=1.1, top=0.3)
    for axis, (mix, found) in zip(axes, runs.items(), strict=True):
        ends = []
        for label, reference in found.items():
            if not data.available([reference]) or (curve := data.curve(reference, "reward")) is None:
                continue
            line = smooth(curve[1].mean(0), 5)
            axis.plot(curve[0], line, color=colour(label), linewidth=2, linestyle="--" if label == "base" else "-", zorder=3)
            ends.append((curve[0][-1], line[-1], label, colour(label)))
        axis.set_title(f"RL mix {mix.upper()}", fontsize=SMALL, loc="left", color=INK)
        axis.set(xlabel="GRPO step", ylabel="Reward", ylim=(-0.02, 1.02))
        axis.margins(x=0.01)
        label_ends(axis, ends, height)
    return figure


def cells(data: Artifacts, family: str) -> list[dict[str, dict[str, np.ndarray]]]:
    """Per seed cells[mid][rl]: pass@1 of each test item of a family."""
    import numpy as np

    found = []
    for seed in data.seeds:
        table: dict[str, dict[str, np.ndarray]] = {}
        ids: list[str] = []  # cells are paired by item, whatever the order of rows
        for mid in MIXES:
            table[mid] = {}
            for rl in MIXES:
                rows = data.rows(data.path(f"evaluate/reasoning/prism-{mid}_rl_{rl}", seed), "items.parquet")
                values = {row["id"]: row["correct"] / row["n"] for row in rows if row["family"] == family}
                ids = ids or sorted(values)
                if values.keys() != set(ids):
                    raise UserError(f"prism-{mid}_rl_{rl} was evaluated on other items than the other cells; rebuild all four.")
                table[mid][rl] = np.array([values[i] for i in ids])
        found.append(table)
    return found


def prism_effects(data: Artifacts, task: str) -> Figure:
    """Main effects of the mid-training mix and of the RL mix, and their interaction, per domain."""
    references = [f"evaluate/reasoning/prism-{mid}_rl_{rl}" for mid in MIXES for rl in MIXES]
    if not data.available(references):
        return note(task, "The four cells were not evaluated.")
    names = {"mid": "mid-training mix", "rl": "RL mix", "interaction": "interaction"}
    families = ("math", "code", "science")
    text = f"pass@1 after RL, MCS minus MC, {over_seeds(data)}, 95% intervals; the other factor averaged."
    figure, axes = canvas("Mid-training mix against RL mix", text, 1.3, columns=3, left=1.45, right=0.2, gap=0.25, top=0.3)
    for axis, family in zip(axes, families, strict=True):
        effects = [main_effects(one) for one in cells(data, family)]
        for row, (name, _) in enumerate(names.items()):
            values = [getattr(one, name) for one in effects]
            estimate, low, high = bootstrap(values)
            axis.plot([low, high], [row, row], color=COLOURS[row], linewidth=1.6)
            axis.plot([v.mean() for v in values], [row] * len(values), "o", color=COLOURS[row], markersize=3, alpha=0.6)
            axis.plot(estimate, row, "s", color=COLOURS[row], markersize=6)
        axis.axvline(0, color=MUTED, linewidth=0.8)
        axis.set(ylim=(2.5, -0.5), yticks=range(3), xlabel="Difference in pass@1")
        axis.set_yticklabels(names.values() if family == families[0] else [])
        axis.set_title(family, fontsize=SMALL, loc="left", color=INK)
        axis.grid(axis="y", visible=False)
    return figure


def lineages(data: Artifacts, file: str) -> list[str]:
    """Lineages that have this table in every seed."""
    found = sorted({path.parents[1].name for path in data.root.glob(f"evaluate/lineage/*/seed*/{manifest.NAME}")})
    paths = {name: [data.path(f"evaluate/lineage/{name}", seed) for seed in data.seeds] for name in found}
    return [name for name in found if all(p.is_file() and file in data.read(p).artifacts for p in paths[name])]


def prism_cka(data: Artifacts, task: str) -> Figure:
    """Centred linear CKA of each pair of checkpoints by layer; thin: without centring."""
    import numpy as np

    found = lineages(data, "cka.parquet")
    if not found:
        return note(task, "The representations of no lineage were compared.")
    reference, height = f"evaluate/lineage/{found[0]}", 2.6
    text = (
        f"Mean-pooled hidden states of held-out prose, {over_seeds(data)}. Dotted: without centring, near 1 for any two models."
    )
    figure, (axis,) = canvas("Similarity of representations (linear CKA)", text, height, right=2.1, left=0.95)
    series: dict[str, dict[str, list[list[float]]]] = {}
    for seed in data.seeds:
        rows = data.rows(data.path(reference, seed), "cka.parquet")
        for pair in dict.fromkeys(row["pair"] for row in rows):
            for kind in ("centred", "uncentred"):
                values = [row[kind] for row in rows if row["pair"] == pair]
                series.setdefault(pair, {}).setdefault(kind, []).append(values)
    ends = []
    for i, (pair, kinds) in enumerate(series.items()):
        centred, other = np.mean(kinds["centred"], 0), np.mean(kinds["uncentred"], 0)
        ink = COLOURS[i % len(COLOURS)]
        axis.plot(range(len(other)), other, color=ink, linewidth=1, linestyle=":")
        axis.plot(range(len(centred)), centred, color=ink, linewidth=2)
        ends.append((len(centred) - 1, centred[-1], pair.replace(">", " → "), ink))
    axis.set(xlabel="Layer (0: embedding)", ylabel="CKA", xticks=range(len(centred)))
    label_ends(axis, ends, height)
    return figure


def prism_landscape(data: Artifacts, task: str) -> Figure:
    """Pass rate on the plane through base, mid and RL, and along the path between them."""
    import numpy as np

    found = lineages(data, "landscape.parquet")
    if not found:
        return note(task, "No plane between checkpoints was evaluated.")
    rates: dict[tuple[float, float], list[float]] = {}
    path: dict[float, list[float]] = {}
    for seed in data.seeds:
        for row in data.rows(data.path(f"evaluate/lineage/{found[0]}", seed), "landscape.parquet"):
            rates.setdefault((row["a"], row["b"]), []).append(row["pass_rate"])
            if row["path"]:
                path.setdefault(row["a"] + row["b"], []).append(row["pass_rate"])
    side = sorted({b for a, b in rates if a not in (0.0, 1.0) and b not in (0.0, 1.0)} | {0.0, 1.0})
    grid = np.array([[np.mean(rates[a, b]) for a in side] for b in side])
    text = (
        f"W = base + a (mid − base) + b (RL − mid), greedy pass rate, {over_seeds(data)}. Base is (0, 0), mid (1, 0), RL (1, 1)."
    )
    figure, axes = canvas("Between base, mid-trained and RL", text, 2.7, columns=2, gap=1.0)
    axes[0].imshow(grid, origin="lower", cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            axes[0].text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=PAPER if value > 0.6 else "#1f2329")
    axes[0].set(xlabel="a", ylabel="b", xticks=range(len(side)), yticks=range(len(side)))
    axes[0].set_xticklabels([f"{v:g}" for v in side])
    axes[0].set_yticklabels([f"{v:g}" for v in side])
    axes[0].grid(visible=False)
    places = sorted(path)
    axes[1].plot(places, [np.mean(path[p]) for p in places], "o-", color=COLOURS[0], markersize=4)
    axes[1].set(xlabel="path", ylabel="Pass rate", xticks=(0, 1, 2), ylim=(-0.03, 1.03))
    axes[1].set_xticklabels(("base", "mid", "RL"))
    return figure


def prism_frontier(data: Artifacts, task: str) -> Figure:
    """Training pass rate over RL steps of prompts grouped by how often the start solved them."""
    import numpy as np

    passes, run = "rl/passes/prism-mcs", "rl/grpo/prism_filtered-mcs"
    if not (data.available([passes]) and data.available([run])):
        return note(task, "No pass counts of the start were taken.")
    groups = {"0": (0, 0), "1 to 4": (1, 4), "5 to 8": (5, 8), "9 to 12": (9, 12), "13 to 15": (13, 15), "16": (16, 16)}
    pooled: dict[str, list[tuple[int, float, int]]] = {name: [] for name in groups}
    sizes = dict.fromkeys(groups, 0)
    for seed in data.seeds:
        counts = {row["id"]: row["correct"] for row in data.rows(data.path(passes, seed), "passes.parquet")}
        for name, (low, high) in groups.items():
            sizes[name] += sum(low <= c <= high for c in counts.values())
        for row in data.rows(data.path(run, seed), "rewards.parquet"):
            for name, (low, high) in groups.items():
                if low <= counts.get(row["id"], -1) <= high:
                    pooled[name].append((row["step"], row["correct"], row["n"]))
    text = (
        f"RL from MCS on prompts that it solves now and then, {over_seeds(data)}: training pass rate of the prompts met in each "
        "tenth of RL, by right samples of 16 before RL (in brackets: prompts of that kind per seed)."
    )
    height = 2.4
    figure, (axis,) = canvas("Solvability frontier", text, height, right=2.2)
    last = max((step for rows in pooled.values() for step, _, _ in rows), default=0) + 1
    ends = []
    for i, (name, rows) in enumerate(pooled.items()):
        bins: dict[int, list[float]] = {}
        for step, correct, n in rows:
            found = bins.setdefault(step * 10 // last, [0.0, 0.0])
            found[0], found[1] = found[0] + correct, found[1] + n
        if not bins:
            continue
        places = sorted(bins)
        values = [bins[b][0] / bins[b][1] for b in places]
        axis.plot([(b + 0.5) * last / 10 for b in places], values, "o-", color=COLOURS[i], linewidth=1.8, markersize=3.5)
        ends.append(
            (
                (places[-1] + 0.5) * last / 10,
                values[-1],
                f"{name} of 16 ({np.round(sizes[name] / len(data.seeds)):g})",
                COLOURS[i],
            )
        )
    axis.set(xlabel="GRPO step", ylabel="Pass rate", ylim=(-0.03, 1.03))
    label_ends(axis, ends, height)
    return figure


PLOTS = (prism_retention, prism_rl, prism_effects, prism_cka, prism_landscape, prism_frontier)


def main(job: Config) -> None:
    drawing.write(PLOTS, Artifacts(job), ("prism",), job.folder)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
