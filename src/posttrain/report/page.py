"""The whole study on one self-contained HTML page: ledger, tables of arms, plots, rollouts, data, cost."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from posttrain.core import cli, manifest, tables
from posttrain.core.errors import UserError
from posttrain.report.artifacts import Artifacts, ReportConfig, interval, reachable
from posttrain.report.ledger import VERDICTS

TEMPLATE = Path(__file__).with_name("page.html.j2")
PLOTS = {
    "rl_curves": "Reward over RL",
    "before_after": "Before and after RL",
    "rank_reversal": "SFT score against post-RL score",
    "weights": "PEAR's weights over SFT",
    "retention": "Retention of real text",
}
ROLLOUTS_PER_TASK = 12
SHOWN_CHARACTERS = 300


class Config(ReportConfig):
    """The same keys as the plots; --output is the page."""


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def forest(row: dict[str, str]) -> dict[str, float] | None:
    """Positions on an axis of 150 units that holds the interval and the reference (0, or 1 for a ratio)."""
    if not row["estimate"]:
        return None
    estimate, low, high = (float(row[name]) for name in ("estimate", "ci_low", "ci_high"))
    reference = 1.0 if row["claim"].startswith("overhead") else 0.0
    span = max(abs(low - reference), abs(high - reference), 1e-9) * 1.1
    return {
        name: round(75 + 70 * (value - reference) / span, 1)
        for name, value in (("zero", reference), ("low", low), ("high", high), ("estimate", estimate))
    }


def ledger(root: Path) -> list[dict[str, Any]]:
    """Rows of claims.csv with what the page shows of them."""
    with open(root / "claims.csv") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        has = bool(row["estimate"])
        row["shown"] = number(float(row["estimate"])) if has else ""
        row["interval"] = f"[{float(row['ci_low']):.3f}, {float(row['ci_high']):.3f}]" if has else ""
        row["forest"] = forest(row)
    return rows


def passes(artifacts: Artifacts, task: str, checkpoint: str, k: int) -> str:
    """Mean and half-width of pass@k, or nothing where too few samples were drawn for k."""
    try:
        found = interval(artifacts.passes(task, checkpoint, k), share=True)
    except UserError:
        return ""
    return f"{found.estimate:.3f} ± {(found.high - found.low) / 2:.3f}"


def arm_table(artifacts: Artifacts, task: str) -> list[dict[str, Any]]:
    """One row per start of RL: scores before and after, and what RL and the weights looked like."""
    rows = []
    for start in artifacts.starts:
        before, after = artifacts.checkpoints(start)
        sft, rl = f"sft/train/{task}-{start}", f"rl/grpo/{task}-{start}"

        def metric(reference: str, name: str, digits: int = 3) -> str:
            return number((artifacts.metric(reference, name) or (None,))[0], digits)

        known = start in artifacts.arms
        cells = [metric(sft, "validation/nll_per_trace") if known else ""]
        cells += [passes(artifacts, task, name, k) for k in (1, 8) for name in (before, after)]
        cells += [metric(rl, "kl_to_start"), metric(rl, "mean/frac_reward_zero_std")]
        cells += [metric(sft, "weights/mean"), metric(sft, "weights/ess")] if known else ["", ""]
        rows.append({"start": start, "cells": cells})
    return rows


def rollouts(artifacts: Artifacts, task: str) -> list[dict[str, Any]]:
    """A few completions of each start's last RL step, first seed."""
    seed, found = artifacts.seeds[0], []
    each = max(1, ROLLOUTS_PER_TASK // len(artifacts.starts))
    for start in artifacts.starts:
        path = artifacts.path(f"rl/grpo/{task}-{start}", seed)
        for row in artifacts.rows(path, "rollouts.parquet")[:each] if path.is_file() else ():
            short = {name: str(row[name])[:SHOWN_CHARACTERS] for name in ("prompt", "completion", "answer")}
            found.append({**short, "reward": row["reward"], "prompt": f"{short['prompt']}  ({start})"})
    return found


def data_cards(found: list[Path], artifacts: Artifacts) -> list[dict[str, Any]]:
    rows = []
    for path in found:
        one = artifacts.read(path)
        if one.stage == "data" and one.method in ("corpus", "tasks", "mix"):
            licences = "; ".join(f"{n}: {t}" for n, t in one.card.get("licences", {}).items())
            shown = {n: f"{m.value:,.4g}" if m.value % 1 else f"{int(m.value):,}" for n, m in one.metrics.items()}
            rows.append({"name": one.identity, "metrics": shown, "licences": licences})
    return rows


def costs(found: list[Path]) -> list[dict[str, Any]]:
    """Wall time and memory per stage and method, from provenance.json."""
    groups: dict[str, list[dict[str, float]]] = {}
    for path in found:
        stage = "/".join(path.parts[-5:-3])
        groups.setdefault(stage, []).append(json.loads((path.parent / "provenance.json").read_text()))
    return [
        {
            "stage": stage,
            "jobs": len(jobs),
            "seconds": f"{sum(job['wall_seconds'] for job in jobs):.0f}",
            "longest": f"{max(job['wall_seconds'] for job in jobs):.0f}",
            "memory": f"{max(job['peak_memory_mb'] for job in jobs):.0f}",
        }
        for stage, jobs in sorted(groups.items())
    ]


def pretrained(artifacts: Artifacts, compared: set[str]) -> list[dict[str, Any]]:
    """Evaluations of models that are no arm of a comparison."""
    rows = []
    for path in sorted(artifacts.root.glob(f"evaluate/*/*/seed{artifacts.seeds[0]}/{manifest.NAME}")):
        one = artifacts.read(path)
        if one.variant in compared:
            continue
        for name, value in one.metrics.items():
            rows.append(
                {"evaluation": f"{one.method}/{one.variant}", "metric": name, "value": number(value.value), "n": value.n or ""}
            )
    return rows


def inline(path: Path) -> str:
    """An SVG as part of the page: ids get the plot's name, so that two plots do not share a gradient or a clip path."""
    text = path.read_text()
    text = text[text.index("<svg") :]
    name = path.stem
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{name}-\2"', text)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)


def main(job: Config) -> None:
    from jinja2 import Environment

    artifacts = Artifacts(job)
    compared = {f"{t}-{c}" for t in job.tasks for s in artifacts.starts for c in artifacts.checkpoints(s)}
    ends = [
        p for p in job.root.glob(f"evaluate/*/*/seed*/{manifest.NAME}") if int(p.parent.name.removeprefix("seed")) in job.seeds
    ]
    found = reachable(artifacts, ends)
    rows, tasks = ledger(job.root), []
    for task in job.tasks:
        where = artifacts.path(artifacts_task(artifacts, task), job.seeds[0])
        example = tables.read(where.parent / "items.parquet", ["prompt", "answer"])[0]
        tasks.append({"name": task, "rows": arm_table(artifacts, task), "prompt": example["prompt"], "answer": example["answer"]})
    text = (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(TEMPLATE.read_text())
        .render(
            tier=job.root.name,
            seeds=job.seeds,
            devices=sorted({artifacts.read(path).device for path in found}),
            packages=artifacts.read(found[0]).packages if found else {},
            jobs=len(found),
            verdicts={verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS},
            ledger=rows,
            tasks=tasks,
            plots=[{"title": title, "svg": inline(job.output.parent / f"{name}.svg")} for name, title in PLOTS.items()],
            rollouts=[{"title": task, "rows": rollouts(artifacts, task)} for task in job.tasks],
            pretrained=pretrained(artifacts, compared),
            data=data_cards(found, artifacts),
            cost=costs(found),
        )
    )
    manifest.write_atomically(job.output, text)


def artifacts_task(artifacts: Artifacts, task: str) -> str:
    """Reference of an evaluation of this task that exists (its per-item table holds prompts and answers)."""
    for start in artifacts.starts:
        for name in artifacts.checkpoints(start):
            reference = f"evaluate/reasoning/{task}-{name}"
            if artifacts.path(reference, artifacts.seeds[0]).is_file():
                return reference
    raise UserError(f"{artifacts.root}/evaluate/reasoning holds no result of task {task}; run `snakemake evaluate_all` first.")


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
