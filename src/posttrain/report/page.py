"""The whole study on one self-contained HTML page: ledger, plots, tables of arms, rollouts, data, cost."""

from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from posttrain.core import cli, manifest
from posttrain.core.config import key
from posttrain.core.errors import UserError
from posttrain.report.artifacts import BASE, GRID, INK, MUTED, PAPER, Artifacts, ReportConfig, interval, reachable
from posttrain.report.claims import Config as ClaimsConfig
from posttrain.report.ledger import COLUMNS, VERDICTS, Claim, read_claims
from posttrain.report.sections import NAMES, SECTIONS

TEMPLATE = Path(__file__).with_name("page.html.j2")
SVG = "{http://www.w3.org/2000/svg}"
PLOTS = {
    "rl_curves": "Reward over RL",
    "before_after": "pass@1 before and after RL",
    "rank_reversal": "SFT score against pass@1 after RL",
    "weights": "PEAR's weights over SFT",
    "retention": "Retention of real text",
}
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", PAPER: "var(--paper)"}
SCALES = {  # what the estimate of a kind of claim is, and where "no effect" lies
    "difference": ("Difference in {metric} between two arms", 0.0),
    "at_most": ("Difference in {metric} between two arms that should be small", 0.0),
    "scalar": ("{metric}", 0.0),
    "rows": ("{metric}", 0.0),
    "reversal": ("Reversed pair: {metric} after RL, other arm minus the arm with the better SFT score", 0.0),
    "overhead": ("Cost: {metric}", 1.0),
    "not_testable": ("Not testable in this tier", 0.0),
}
SPLITS = ("train", "validation", "test")
FOREST = 150  # units across the inline plot of an interval
LONGEST = 400  # characters of a completion that are shown


class Config(ReportConfig):
    """The keys of the plots, which lie beside --output, and the file that states the claims."""

    claims: Path = key(Path("configs/claims.yaml"), help="what is claimed")
    measured: tuple[str, ...] = key((), help="<stage>/<method>/<variant> of everything that ends in a number")
    methods: tuple[str, ...] = key((), help="methods with a section of their own, whose plots lie beside --output")


# --- numbers ----------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """Fixed decimals, a true minus, whole numbers with separators; a dash for what was not measured."""
    if value is None:
        return "–"
    if digits and float(value).is_integer() and abs(value) >= 1000:
        digits = 0
    return f"{value:,.{digits}f}".replace("-", "−")


def plain(value: float) -> str:
    """A count as a count, anything else with three significant digits."""
    return number(value, 0) if float(value).is_integer() else f"{value:.3g}".replace("-", "−")


def bounded(samples: list) -> dict[str, str]:
    """Mean and interval of a share."""
    estimate, low, high = interval(samples, share=True)
    return {"value": number(estimate), "interval": f"[{number(low)}, {number(high)}]"}


# --- ledger -----------------------------------------------------------------------------------------------------


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Rows of claims.csv, numbers as numbers."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; build it with `snakemake {path}`.")
    with open(path, encoding="utf-8", newline="") as stream:
        rows: list[dict[str, Any]] = list(csv.DictReader(stream))
    if not rows or set(rows[0]) != set(COLUMNS):
        raise UserError(f"{path} is not a claims ledger (columns {', '.join(COLUMNS)}); delete it and run `snakemake {path}`.")
    for row in rows:
        row |= {name: float(row[name]) if row[name] else None for name in ("estimate", "ci_low", "ci_high")}
    return rows


def ticks(low: float, high: float) -> list[float]:
    """Three or four round numbers within [low, high]."""
    size = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 4)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def group(method: str, kind: str, metric: str, control: bool, rows: list[tuple[dict[str, Any], Claim]]) -> dict[str, Any]:
    """Claims of a method on one scale: their intervals share an axis, so that lengths can be compared."""
    title, reference = SCALES[kind]
    if control:
        title = f"Controls, not claims of the paper: {title[0].lower()}{title[1:]}"
    measured = [row for row, _ in rows if row["estimate"] is not None]
    ends = [row[name] for row in measured for name in ("estimate", "ci_low", "ci_high") if row[name] is not None]
    ends += [limit(claim) for row, claim in rows if row["estimate"] is not None]
    ends += [-claim.bound for row, claim in rows if row["estimate"] is not None and claim.two_sided]
    low, high = min([reference, *ends]), max([reference, *ends])
    margin = (high - low) * 0.06 or 1.0
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return round((value - low) / (high - low) * FOREST, 1)

    found = []
    for row, claim in rows:
        shown = {
            **row,
            "source": claim.source,
            "forest": None,
            "shown": None,
            "interval": None,
            "class": row["verdict"].split()[0],
        }
        if row["estimate"] is not None:
            above = claim.bound is None or (claim.kind in ("scalar", "rows") and claim.side == "at_least")
            counts = (place(limit(claim)), FOREST) if above else (0, place(limit(claim)))
            if claim.two_sided:
                counts = (place(-claim.bound), place(claim.bound))
            known = row["ci_low"] is not None
            columns = (("low", "ci_low"), ("high", "ci_high")) if known else (("low", "estimate"), ("high", "estimate"))
            shown["forest"] = {name: place(row[column]) for name, column in columns} | {
                "estimate": place(row["estimate"]),
                "counts": counts[0],
                "width": round(counts[1] - counts[0], 1),
            }
            shown["shown"] = number(row["estimate"])
            shown["interval"] = f"[{number(row['ci_low'])}, {number(row['ci_high'])}]" if known else None
        found.append(shown)
    marks = [{"x": place(tick), "text": f"{tick:g}".replace("-", "−")} for tick in ticks(low, high)] if measured else []
    return {
        "title": f"{NAMES.get(method, method)}: {title.format(metric=metric)}",
        "reference": place(reference),
        "ticks": marks,
        "rows": found,
    }


def limit(claim: Claim) -> float:
    """Where effects that count begin."""
    return claim.smallest_effect if claim.bound is None else claim.bound


def ledger(rows: list[dict[str, Any]], job: Config) -> list[dict[str, Any]]:
    """The ledger's rows with the claims that they answer, grouped by scale, in the ledger's order."""
    claims, groups = read_claims(job.claims), {}
    for row in rows:
        claim = claims.get(row["method"], {}).get(row["claim"])
        if claim is None:
            where = job.root / "claims.csv"
            raise UserError(
                f"{where} has a row {row['method']}.{row['claim']} that {job.claims} does not state; rebuild {where}."
            )
        groups.setdefault((row["method"], claim.kind, claim.metric, claim.control), []).append((row, claim))
    return [group(*scale, found) for scale, found in groups.items()]


# --- tasks ------------------------------------------------------------------------------------------------------


def drawings(path: Path, title: str, tasks: tuple[str, ...]) -> dict[str, str]:
    """task -> its drawing from one of the plots, for use inside the page: theme colours, no name spaces."""
    try:
        root = ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; build it with `snakemake {path}`.") from None
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is not valid XML ({error}); delete it and run `snakemake {path}`.") from None
    children, found = {child.get("id"): child for child in root}, {}
    ElementTree.register_namespace("", SVG[1:-1])
    for task in tasks:
        child = children.get(f"{path.stem}-{task}")
        if child is None:
            raise UserError(f"{path} has no drawing of task {task}; delete it and run `snakemake {path}`.")
        for parent in child.iter():
            for style in parent.findall(f"{SVG}style"):  # would hold for the whole page; the page has its own
                parent.remove(style)
        for name in ("width", "height", "x", "y"):
            child.attrib.pop(name, None)
        child.attrib |= {"role": "img", "aria-label": f"{title}, {task}", "class": "plot"}
        text = ElementTree.tostring(child, encoding="unicode")
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
        found[task] = re.sub("|".join(THEME), lambda hit: THEME[hit[0]], text).strip()
    return found


def arm_table(data: Artifacts, task: str) -> dict[str, Any]:
    """One row per start of RL: scores before and after, and what RL and the weights looked like."""
    evaluated = data.evaluated("reasoning", task)
    ks = data.manifest(f"evaluate/reasoning/{task}-{BASE}", data.seeds[0]).config["k"] if evaluated else []

    def metric(reference: str, name: str) -> dict[str, str]:
        found = data.metric(reference, name) if data.available([reference]) else None
        value, error = found or (None, None)
        return {"value": number(value), "interval": f"± {number(error)}" if error is not None else ""}

    rows = []
    for start in data.starts:
        sft, rl = f"sft/train/{task}-{start}", f"rl/grpo/{task}-{start}"
        cells = [metric(sft, "validation/nll_per_trace")]
        cells += [bounded(data.passes(task, name, k)) for k in sorted(ks) for name in data.checkpoints(start)]
        cells += [metric(rl, name) for name in ("mean/reward", "kl_to_start", "mean/frac_reward_zero_std")]
        cells += [metric(sft, "weights/mean"), metric(sft, "weights/ess")]
        rows.append({"start": start, "colour": data.colour(start), "cells": cells})
    return {"ks": sorted(ks), "rows": rows}


def checkpoints(data: Artifacts, method: str, measured: tuple[str, ...]) -> dict[str, Any]:
    """One row per checkpoint of a method's evaluations, one column per metric; the mean over seeds."""
    rows: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for reference in measured:
        stage, _, variant = reference.split("/")
        task, _, name = variant.partition("-")
        if stage != "evaluate" or not name or task != method or not data.available([reference]):
            continue
        for metric in data.manifest(reference, data.seeds[0]).metrics:
            found = data.metric(reference, metric)
            if found and not metric.startswith("pass@8"):
                columns.setdefault(metric)
                rows.setdefault(name, {})[metric] = number(found[0])
    return {"columns": list(columns), "rows": rows}


def rollouts(data: Artifacts, task: str) -> list[dict[str, Any]]:
    """Of each start's last RL step in the first seed: a right completion and a wrong one, if there are both."""
    found = []
    for start in data.starts:
        path = data.path(f"rl/grpo/{task}-{start}", data.seeds[0])
        # A run that was resumed after its last step has no completions to show.
        if not path.is_file() or "rollouts.parquet" not in data.read(path).artifacts:
            continue
        by_reward: dict[float, dict[str, Any]] = {}
        for row in data.rows(path, "rollouts.parquet"):
            by_reward.setdefault(row["reward"], row)
        for reward, row in sorted(by_reward.items(), reverse=True)[:2]:
            shown = {name: shorten(row[name]) for name in ("prompt", "completion", "answer")}
            found.append({**shown, "start": start, "colour": data.colour(start), "reward": f"{reward:g}"})
    return found


def shorten(text: Any) -> str:
    text = str(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text):,} characters)"


def example(data: Artifacts, task: str) -> dict[str, str] | None:
    """A test item of the task, with its prompt and answer."""
    if not data.evaluated("reasoning", task):
        return None
    return data.rows(data.path(f"evaluate/reasoning/{task}-{BASE}", data.seeds[0]), "items.parquet")[0]


# --- data, models, cost -----------------------------------------------------------------------------------------


def pretrained(data: Artifacts) -> list[dict[str, Any]]:
    """Evaluations of models that are no start of RL and did not come out of it: their names are the configuration's."""
    variants = sorted({path.parents[1] for path in data.root.glob(f"evaluate/*/*/seed*/{manifest.NAME}")})
    by_digest = {manifest.sha256(path): path for path in data.root.glob(f"base/*/*/seed*/{manifest.NAME}")}
    found = []
    for folder in variants:
        reference, checkpoint = str(folder.relative_to(data.root)), folder.name.partition("-")[2]
        compared = checkpoint == BASE or checkpoint.startswith(("sft_", "rl_"))
        if compared or not all(data.path(reference, seed).is_file() for seed in data.seeds):
            continue
        first = data.path(reference, data.seeds[0])
        one = data.read(first)
        model = by_digest.get(one.inputs.get("model", ""))
        if model is None or data.read(model).method not in ("packaged", "hub"):
            continue  # checkpoints of the study have sections of their own
        card = {"manifest": data.read(model).identity, **data.read(model).card}
        if "parameters" in data.read(model).metrics:
            card["parameters"] = plain(data.read(model).metrics["parameters"].value)
        metrics = []
        for name, own in one.metrics.items():
            value, _ = data.metric(reference, name) or (None, None)
            metrics.append({"name": name, "value": number(value), "error": number(own.se), "n": own.n})
        samples = data.rows(first, "items.parquet")[:3] if "items.parquet" in one.artifacts else []
        samples = [{name: shorten(row[name]) for name in ("prompt", "first_response", "answer")} for row in samples]
        found.append({"name": reference.partition("/")[2], "card": card, "metrics": metrics, "samples": samples})
    return found


def ends(data: Artifacts, models: list[dict[str, Any]]) -> list[Path]:
    """Manifests that nothing else is built on: evaluations, and the timing of weights."""
    references = [f"sft/overhead/{task}" for task in data.tasks]
    for method in ("reasoning", "retention"):
        references += [f"evaluate/{method}/{t}-{name}" for t in data.tasks for s in data.starts for name in data.checkpoints(s)]
    references += [f"evaluate/{model['name']}" for model in models]
    return [data.path(reference, seed) for reference in references for seed in data.seeds]


def split_of(text: str) -> str:
    """The split that a metric's name ends in, or nothing."""
    end = text.rpartition("/")[2]
    return end if end in SPLITS else ""


def data_cards(found: list[Path], data: Artifacts) -> list[dict[str, Any]]:
    """What the study's data hold: one row per data set, of the first seed that has it."""
    rows: dict[str, dict[str, Any]] = {}
    for path in found:
        one = data.read(path)
        name = f"{one.method}/{one.variant}"
        if name in rows or (one.stage, one.method) not in (
            ("data", "corpus"),
            ("data", "tasks"),
            ("data", "facts"),
            ("data", "domains"),
            ("data", "mix"),
            ("sft", "traces"),
        ):
            continue
        realised, families, counts = one.card.get("realised", {}), one.card.get("families", {}), {}
        ordered = sorted(one.metrics, key=lambda text: (text.partition("/")[0], (*SPLITS, "").index(split_of(text)), text))
        for text in ordered:
            what, _, part = text.partition("/")
            if what != "overlap" and part not in realised:  # parts of a mix have their own column
                counts.setdefault(what.replace("_", " "), []).append(f"{plain(one.metrics[text].value)} {part}".strip())
        parts = {part: ", ".join(f"{plain(v)} {unit}" for unit, v in values.items()) for part, values in realised.items()}
        overlap = {text.partition("/")[2].replace("_", " "): one.metrics[text] for text in ordered if text.startswith("overlap/")}
        rows[name] = {
            "name": name,
            "counts": {what: ", ".join(values) for what, values in counts.items()},
            "overlap": {what: plain(value.value) for what, value in overlap.items()},
            "parts": parts or {part: f"{plain(count)} items" for part, count in families.items() if len(families) > 1},
            "licences": one.card.get("licences", {}),
            "ngram": one.config.get("ngram"),
        }
    return sorted(rows.values(), key=lambda row: row["name"])


def costs(found: list[Path]) -> list[dict[str, Any]]:
    """Wall time and peak memory per stage and method, from what the jobs left beside their manifests."""
    groups: dict[str, list[dict[str, float]]] = {}
    for path in found:
        beside = path.parent / "provenance.json"
        if beside.is_file():
            groups.setdefault("/".join(path.parts[-5:-3]), []).append(json.loads(beside.read_text(encoding="utf-8")))
    groups = {**dict(sorted(groups.items())), "total": [job for jobs in groups.values() for job in jobs]}
    return [
        {
            "stage": stage,
            "jobs": len(jobs),
            "seconds": number(sum(job["wall_seconds"] for job in jobs), 1),
            "longest": number(max(job["wall_seconds"] for job in jobs), 1),
            "memory": number(max(job["peak_memory_mb"] for job in jobs), 0),
        }
        for stage, jobs in groups.items()
        if jobs
    ]


def main(job: Config) -> None:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    data, rows = Artifacts(job), read_ledger(job.root / "claims.csv")
    groups = ledger(rows, job)
    stated = read_claims(job.claims)
    rows = [row for row in rows if not stated[row["method"]][row["claim"]].control]  # only claims are counted
    plots = {name: drawings(job.folder / f"{name}.svg", title, job.tasks) for name, title in PLOTS.items()}
    methods = [
        {
            "name": NAMES.get(name, name),
            "anchor": name,
            "plots": [
                {"title": title, "svg": Markup(drawings(job.folder / f"{plot}.svg", title, (name,))[name])}
                for plot, title in SECTIONS[name].items()
            ],
            "table": checkpoints(data, name, job.measured),
        }
        for name in job.methods
    ]
    models = pretrained(data)
    found = reachable(data, [*ends(data, models), *(data.path(r, s) for r in job.measured for s in job.seeds)])
    manifests = [data.read(path) for path in found]
    packages: dict[str, set[str]] = {}
    for one in manifests:
        for name, version in one.packages.items():
            packages.setdefault(name, set()).add(version)
    tasks = [
        {
            "name": task,
            "example": example(data, task),
            "table": arm_table(data, task),
            "rollouts": rollouts(data, task),
            "plots": [{"title": title, "svg": Markup(plots[name][task])} for name, title in PLOTS.items()],
        }
        for task in job.tasks
    ]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        tier=job.root.name,
        seeds=job.seeds,
        arms=job.arms,
        devices=sorted({one.device for one in manifests}),
        packages={name: " / ".join(sorted(versions)) for name, versions in sorted(packages.items())},
        jobs=len(found),
        verdicts={verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS},
        claims=len(rows),
        groups=groups,
        forest=FOREST,
        tasks=tasks,
        methods=methods,
        pretrained=models,
        data=data_cards(found, data),
        cost=costs(found),
        inexact={f"{one.stage}/{one.method}": one.not_deterministic for one in manifests if one.not_deterministic},
        resamples=ClaimsConfig.model_fields["resamples"].default,
    )
    manifest.write_atomically(job.output, text)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
