"""The claims ledger: each paper's figure beside our estimate, its interval and a verdict. Reads files alone."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError
from posttrain.core.stats import Interval, bootstrap, kendall_tau, pass_at_k
from posttrain.report.ledger import COLUMNS, Claim, Verdict, judge, judge_bound, read_claims


class Config(JobConfig):
    root: Path = key(help="results/<tier>")
    seeds: tuple[int, ...] = key(help="seeds of the study")
    arms: tuple[str, ...] = key(help="SFT arms, in order")
    claims: Path = key(Path("configs/claims.yaml"), help="what is claimed")
    resamples: int = key(4000, help="bootstrap resamples", gt=100)


class Results:
    """Per-item values of evaluated checkpoints, read once."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, {}

    def manifest(self, reference: str, seed: int) -> Path:
        return self.root / reference / f"seed{seed}" / manifest.NAME

    def has(self, reference: str, seed: int) -> bool:
        return self.manifest(reference, seed).is_file()

    def items(self, task: str, checkpoint: str, seed: int, metric: str):
        """{item id: value of pass@k}"""
        where = self.manifest(f"evaluate/reasoning/{task}-{checkpoint}", seed)
        if where not in self.cache:
            manifest.read(where)
            self.cache[where] = tables.read(where.parent / "items.parquet", ["id", "n", "correct"])
        rows = self.cache[where]
        if not metric.startswith("pass@"):
            raise UserError(f"configs/claims.yaml: metric '{metric}' is not pass@k; correct it.")
        values = pass_at_k([row["n"] for row in rows], [row["correct"] for row in rows], int(metric.removeprefix("pass@")))
        return dict(zip((row["id"] for row in rows), values.tolist(), strict=True))

    def nll(self, task: str, arm: str, seed: int) -> list[float]:
        """Negative log-likelihood of each validation trace after SFT."""
        where = self.manifest(f"sft/train/{task}-{arm}", seed)
        manifest.read(where)
        return [row["nll"] for row in tables.read(where.parent / "validation.parquet")]


def paired(results: Results, task: str, checkpoints: list[str], seed: int, metric: str):
    """float64 [items, checkpoints]; the items of all checkpoints must be the same."""
    import numpy as np

    columns = [results.items(task, name, seed, metric) for name in checkpoints]
    for name, column in zip(checkpoints, columns, strict=True):
        if column.keys() != columns[0].keys():
            raise UserError(f"{name} and {checkpoints[0]} of {task} were evaluated on different items; rebuild both evaluations.")
    return np.array([[column[i] for column in columns] for i in columns[0]])


def difference(claim: Claim, results: Results, seeds: tuple[int, ...], resamples: int) -> tuple[Interval, int]:
    values = [paired(results, claim.task, [claim.arm, claim.baseline], s, claim.metric) for s in seeds]
    return bootstrap([v[:, 0] - v[:, 1] for v in values], resamples=resamples), sum(map(len, values))


def rank(claim: Claim, results: Results, seeds: tuple[int, ...], arms: list[str], resamples: int) -> tuple[Interval, int]:
    """Minus Kendall's tau between the SFT score and the post-RL score of the arms: positive is reversal.

    The likelihood is of validation traces, the accuracy of test items: unrelated rows that are resampled together, as
    many as the shorter of the two has.
    """
    import numpy as np

    k, samples = len(arms), []
    for s in seeds:
        after = paired(results, claim.task, [f"rl_{arm}" for arm in arms], s, claim.metric)
        if claim.score == "accuracy":
            before = paired(results, claim.task, [f"sft_{arm}" for arm in arms], s, claim.metric)
        else:
            before = -np.array([results.nll(claim.task, arm, s) for arm in arms]).T
        n = min(len(before), len(after))
        samples.append(np.concatenate([before[:n], after[:n]], axis=1))
    statistic = lambda means: -kendall_tau(means[..., :k], means[..., k:])  # noqa: E731
    return bootstrap(samples, statistic, resamples=resamples), sum(map(len, samples))


def overhead(claim: Claim, results: Results, seeds: tuple[int, ...], resamples: int) -> tuple[Interval, int]:
    """Ratio of mean step times on the same batches."""
    import numpy as np

    samples = []
    for s in seeds:
        where = results.manifest(f"sft/overhead/{claim.task}", s)
        manifest.read(where)
        rows = tables.read(where.parent / "step_times.parquet")
        samples.append(np.array([[row[claim.arm], row[claim.baseline]] for row in rows]))
    return bootstrap(samples, lambda means: means[..., 0] / means[..., 1], resamples=resamples), sum(map(len, samples))


def measure(name: str, method: str, claim: Claim, results: Results, job: Config) -> dict[str, Any]:
    """One row of the ledger."""
    row = {"method": method, "claim": name, "statement": claim.statement, "paper_value": claim.paper_value}
    empty = {"estimate": None, "ci_low": None, "ci_high": None, "n": None, "seeds": None}
    if claim.kind == "not_testable":
        return row | empty | Verdict("not testable here", claim.scope)._asdict()
    arms = [arm for arm in job.arms if not arm.startswith("kl")]
    needed = {
        "difference": [f"evaluate/reasoning/{claim.task}-{claim.arm}", f"evaluate/reasoning/{claim.task}-{claim.baseline}"],
        "rank": [f"evaluate/reasoning/{claim.task}-{stage}_{arm}" for stage in ("sft", "rl") for arm in arms],
        "overhead": [f"sft/overhead/{claim.task}"],
    }[claim.kind]
    missing = [reference for reference in needed for s in job.seeds if not results.has(reference, s)]
    if missing:
        reason = f"this tier has no {missing[0]}"
        return row | empty | Verdict("not testable here", reason)._asdict()
    if claim.kind == "difference":
        interval, n = difference(claim, results, job.seeds, job.resamples)
        verdict = judge(interval, claim.smallest_effect, len(job.seeds))
    elif claim.kind == "rank":
        interval, n = rank(claim, results, job.seeds, arms, job.resamples)
        verdict = judge(interval, claim.smallest_effect, len(job.seeds))
    else:
        interval, n = overhead(claim, results, job.seeds, job.resamples)
        verdict = judge_bound(interval, claim.bound, len(job.seeds))
    if claim.kind != "overhead":  # differences of shares and rank correlations end at 1; widening for few seeds does not know
        interval = Interval(interval.estimate, max(interval.low, -1.0), min(interval.high, 1.0))
    numbers = {"estimate": interval.estimate, "ci_low": interval.low, "ci_high": interval.high, "n": n, "seeds": len(job.seeds)}
    reason = f"{verdict.reason}. {claim.scope[0].upper()}{claim.scope[1:]}."
    return row | numbers | {"verdict": verdict.verdict, "reason": reason}


def to_html(rows: list[dict[str, Any]]) -> str:
    """A plain, self-contained table (for Snakemake's report; the page of the project is report/page)."""
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:.3em .6em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(show(row[name]))}</td>" for name in COLUMNS) + "</tr>" for row in rows)
    return f"<!doctype html><meta charset=utf-8><title>Claims ledger</title><style>{style}</style><table><tr>{head}</tr>{body}</table>\n"


def show(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(job: Config) -> None:
    import pandas as pd

    results = Results(job.root)
    claims = read_claims(job.claims)
    rows = [measure(name, method, claim, results, job) for method, found in claims.items() for name, claim in found.items()]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"n": "Int64", "seeds": "Int64"})
    frame.to_parquet(job.output.with_suffix(".parquet"), index=False)
    manifest.write_atomically(job.output.with_suffix(".html"), to_html(rows))
    manifest.write_atomically(job.output, frame.to_csv(index=False, float_format="%.6g"))


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
