"""The claims ledger: each paper's figure beside our estimate, its interval and a verdict. Reads files alone."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError, nearest
from posttrain.core.stats import Interval, bootstrap, pass_at_k, student_half_width
from posttrain.report.ledger import COLUMNS, Claim, Moot, Verdict, judge, judge_bound, judge_reversal, over, read_claims


class Config(JobConfig):
    root: Path = key(help="results/<tier>")
    seeds: tuple[int, ...] = key(help="seeds of the study")
    arms: tuple[str, ...] = key(help="SFT arms, in order")
    claims: Path = key(Path("configs/claims.yaml"), help="what is claimed")
    methods: tuple[str, ...] = key((), help="claims of these methods alone; empty: of all")
    resamples: int = key(4000, help="bootstrap resamples", gt=100)


class Unmeasured(Exception):
    """What a claim needs was not measured in this tier, or is undefined there (0/0): its row says so, the others go on."""


SOURCES = {"loss": "evaluate/retention", "fact_recall": "evaluate/retention"}  # metrics that are not of reasoning


class Results:
    """Per-item values of evaluated checkpoints, read once."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, {}

    def manifest(self, reference: str, seed: int) -> Path:
        return self.root / reference / f"seed{seed}" / manifest.NAME

    def has(self, reference: str, seed: int) -> bool:
        return self.manifest(reference, seed).is_file()

    def rows(self, reference: str, seed: int, file: str, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """A table beside a manifest, read once."""
        where = self.manifest(reference, seed)
        if (where, file) not in self.cache:
            manifest.read(where)
            self.cache[where, file] = tables.read(where.parent / file, columns)
        return self.cache[where, file]

    def items(self, task: str, checkpoint: str, seed: int, metric: str, family: str | None = None) -> dict[str, float]:
        """{id of an item, document or fact: value}."""
        reference = f"{SOURCES.get(metric, 'evaluate/reasoning')}/{task}-{checkpoint}"
        if metric == "loss":
            return {row["id"]: row["nll"] / row["tokens"] for row in self.rows(reference, seed, "documents.parquet")}
        if metric == "fact_recall":
            return {row["id"]: float(row["recalled"]) for row in self.rows(reference, seed, "facts.parquet")}
        found = self.rows(reference, seed, "items.parquet")
        rows = [row for row in found if family is None or row["family"] == family]
        if not rows:
            raise UserError(f"{reference} has no item of the family '{family}'; correct the claim in configs/claims.yaml.")
        if metric == "ungated":
            return {row["id"]: row["correct_ungated"] / row["n"] for row in rows}
        if not re.fullmatch("pass@[1-9][0-9]*", metric):
            raise UserError(f"configs/claims.yaml: metric '{metric}' is not pass@k, ungated, loss or fact_recall; correct it.")
        values = pass_at_k([row["n"] for row in rows], [row["correct"] for row in rows], int(metric.removeprefix("pass@")))
        return dict(zip((row["id"] for row in rows), values.tolist(), strict=True))

    def nll(self, task: str, arm: str, seed: int) -> list[float]:
        """Negative log-likelihood of each validation trace after SFT."""
        where = self.manifest(f"sft/train/{task}-{arm}", seed)
        manifest.read(where)
        return [row["nll"] for row in tables.read(where.parent / "validation.parquet")]


def paired(results: Results, task: str, checkpoints: Sequence[str], seed: int, metric: str, family: str | None = None):
    """float64 [items, checkpoints]; the items of all checkpoints must be the same."""
    import numpy as np

    columns = [results.items(task, name, seed, metric, family) for name in checkpoints]
    for name, column in zip(checkpoints, columns, strict=True):
        if column.keys() != columns[0].keys():
            raise UserError(f"{name} and {checkpoints[0]} of {task} were evaluated on different items; rebuild both evaluations.")
    return np.array([[column[i] for column in columns] for i in columns[0]])


Measured = tuple[Interval, int, Verdict]


def sides(claim: Claim, results: Results, job: Config):
    """Per seed, float64 [items, 2]: arm and baseline of each item; several checkpoints on a side are averaged."""
    import numpy as np

    arms, baselines = claim.arms_compared
    found = []
    for s in job.seeds:
        values = paired(results, claim.task, [*arms, *baselines], s, claim.metric, claim.family)
        found.append(np.stack([values[:, : len(arms)].mean(1), values[:, len(arms) :].mean(1)], 1))
    return found


def difference(claim: Claim, results: Results, job: Config) -> Measured:
    """Mean of arm - baseline over paired items."""
    values = sides(claim, results, job)
    interval = bootstrap([v[:, 0] - v[:, 1] for v in values], resamples=job.resamples)
    if claim.kind == "at_most":
        unit = {"loss": "documents", "fact_recall": "facts"}.get(claim.metric, "items")
        verdict = judge_bound(interval, claim.bound, over(unit, len(job.seeds)), two_sided=claim.two_sided)
        return interval, sum(map(len, values)), verdict
    baseline = sum(float(v[:, 1].mean()) for v in values) / len(values) if claim.metric != "loss" else None
    verdict = judge(interval, claim.smallest_effect, len(job.seeds), baseline=baseline)
    return interval, sum(map(len, values)), verdict


def scalar(claim: Claim, results: Results, job: Config) -> Measured:
    """One number per seed from a job's manifest; its interval is over seeds alone, so one seed has none."""
    import numpy as np

    values = []
    for s in seeds_of(claim, job):
        found = manifest.read(results.manifest(claim.reference, s), verify=False).metrics
        if claim.metric not in found:
            raise Unmeasured(f"{claim.reference} has no metric '{claim.metric}'{nearest(claim.metric, found)}")
        values.append(found[claim.metric].value)
    estimate = float(np.mean(values))
    if len(values) == 1:
        return Interval(estimate, None, None), 1, Verdict("inconclusive", "one number of one seed has no interval")
    half = student_half_width(np.array(values), 0.95)
    interval = Interval(estimate, estimate - half, estimate + half)
    where = f"{len(values)} seeds" if half > 0 else f"{len(values)} seeds, which all gave the same number"
    return interval, len(values), judge_bound(interval, claim.bound, where, side=claim.side, two_sided=claim.two_sided)


def rows_of(claim: Claim, results: Results, reference: str, seed: int, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that `where` keeps; each must have the columns that the claim names, with a number in `columns`."""
    rows = results.rows(reference, seed, claim.file)
    paired_by = claim.pair_by if claim.against else ()
    for name in (*claim.where, *paired_by, *claim.independent_by, *columns):
        if name not in rows[0]:
            raise UserError(f"{reference}: {claim.file} has no column '{name}'{nearest(name, rows[0])}")
    kept = [row for row in rows if all(row[name] == value for name, value in claim.where.items())]
    if not kept:
        raise UserError(f"{reference}: {claim.file} has no row with {claim.where}; correct the claim.")
    for row in kept:
        for name in columns:
            if not isinstance(row[name], int | float):
                raise UserError(
                    f"{reference}: {claim.file} has {row[name]!r} in column '{name}', not a number; correct the claim."
                )
    return kept


def of_rows(claim: Claim, results: Results, job: Config) -> Measured:
    """Mean over independent units of a column, or of its difference to another column or to the same row of another job."""
    import numpy as np

    samples, own, other = [], claim.arm, claim.baseline or claim.arm
    for s in seeds_of(claim, job):
        if claim.against:
            kept, partners = rows_of(claim, results, claim.reference, s, [own]), {}
            for row in rows_of(claim, results, claim.against, s, [other]):
                if partners.setdefault(place := tuple(row[k] for k in claim.pair_by), row) is not row:
                    raise UserError(
                        f"{claim.against}: {claim.file} has several rows for {dict(zip(claim.pair_by, place, strict=True))}; name "
                        "more columns in pair_by, or choose rows with where."
                    )
            values = []
            for row in kept:
                place = tuple(row[k] for k in claim.pair_by)
                if place not in partners:
                    lost = dict(zip(claim.pair_by, place, strict=True))
                    raise UserError(f"{claim.against}: {claim.file} has no row for {lost}; rebuild both jobs.")
                values.append(row[own] - partners[place][other])
        else:
            kept = rows_of(claim, results, claim.reference, s, [own, *([claim.baseline] if claim.baseline else [])])
            values = [row[own] - (row[claim.baseline] if claim.baseline else 0.0) for row in kept]
        units: dict[tuple, list[float]] = {}
        for i, (row, value) in enumerate(zip(kept, values, strict=True)):
            units.setdefault(tuple(row[k] for k in claim.independent_by) or (i,), []).append(value)
        samples.append(np.array([np.mean(unit) for unit in units.values()]))
    count = len(samples) if claim.seeded else 0
    if claim.pooled:
        samples = [np.concatenate(samples)]
    interval = bootstrap(samples, resamples=job.resamples)
    where = f"{claim.unit} of all {count} seeds, each independent" if claim.pooled and count > 1 else over(claim.unit, count)
    compared = bool(claim.against or claim.baseline)
    verdict = judge_bound(interval, claim.bound, where, side=claim.side, two_sided=claim.two_sided, strict=compared)
    return interval, sum(map(len, samples)), verdict


def reversal(claim: Claim, results: Results, job: Config) -> Measured:
    """The pair of arms that is reversed most surely: better SFT score, worse after RL (Bonferroni over all pairs).

    The interval is of (other arm - better-scored arm) after RL. SFT scores and RL scores are of different units (traces
    or items) and are resampled apart, each with all its rows.
    """
    import numpy as np

    arms = list(claim.arms)
    after = [paired(results, claim.task, [f"rl_{arm}" for arm in arms], s, claim.metric) for s in job.seeds]
    if claim.score == "accuracy":
        before = [paired(results, claim.task, [f"sft_{arm}" for arm in arms], s, claim.metric) for s in job.seeds]
    else:
        before = [-np.array([results.nll(claim.task, arm, s) for arm in arms]).T for s in job.seeds]
    pairs = list(combinations(range(len(arms)), 2))
    options = {"resamples": job.resamples, "confidence": 1 - 0.05 / len(pairs)}
    found = []
    for a, b in pairs:
        score = bootstrap([v[:, a] - v[:, b] for v in before], **options)
        gain = bootstrap([v[:, b] - v[:, a] for v in after], **options)
        if score.estimate < 0:  # b has the better score
            a, b, score, gain = b, a, *(Interval(-i.estimate, -i.high, -i.low) for i in (score, gain))
        found.append((score.low > 0, gain, f"{arms[a]} scores better, {arms[b]} starts better"))
    ordered, gain, pair = max(found, key=lambda one: (one[0] and one[1].low > 0, one[1].low))
    verdict = judge_reversal(gain, claim.smallest_effect, len(job.seeds), pair, ordered=ordered)
    return gain, sum(map(len, after)), verdict


def overhead(claim: Claim, results: Results, job: Config) -> Measured:
    """Geometric mean over batches of the ratio of step times on the same batch."""
    import numpy as np

    samples = []
    for s in job.seeds:
        where = results.manifest(f"sft/overhead/{claim.task}", s)
        manifest.read(where)
        rows = tables.read(where.parent / "step_times.parquet")
        samples.append(np.log([row[claim.arm] / row[claim.baseline] for row in rows]))
    interval = Interval(*np.exp(bootstrap(samples, resamples=job.resamples)).tolist())
    return interval, sum(map(len, samples)), judge_bound(interval, claim.bound, over("batches", len(job.seeds)))


def seeds_of(claim: Claim, job: Config) -> tuple[int, ...]:
    """A job that knows no seed lies under seed0."""
    return job.seeds if claim.seeded else (0,)


MEASURES = {
    "difference": difference,
    "at_most": difference,
    "reversal": reversal,
    "overhead": overhead,
    "scalar": scalar,
    "rows": of_rows,
}


def needed(claim: Claim) -> list[str]:
    """References of the jobs that a claim rests on."""
    if claim.kind in ("difference", "at_most"):
        source = SOURCES.get(claim.metric, "evaluate/reasoning")
        return [f"{source}/{claim.task}-{name}" for side in claim.arms_compared for name in side]
    if claim.kind in ("scalar", "rows"):
        return [claim.reference, *([claim.against] if claim.against else [])]
    if claim.kind == "overhead":
        return [f"sft/overhead/{claim.task}"]
    return [f"evaluate/reasoning/{claim.task}-{stage}_{arm}" for stage in ("sft", "rl") for arm in claim.arms]


def moot(condition: Moot, results: Results, seeds: Sequence[int]) -> str | None:
    """Why a comparison says nothing, or None."""
    total, subtracted = 0.0, [(condition.against, -1)] if condition.against else []
    for reference, sign in [(condition.reference, 1), *subtracted]:
        for s in seeds:
            if not results.has(reference, s):
                return f"this tier has no {reference}, which would say whether it can be"
            found = manifest.read(results.manifest(reference, s), verify=False).metrics
            if condition.metric not in found:
                raise UserError(f"{reference} has no metric '{condition.metric}'{nearest(condition.metric, found)}")
            total += sign * found[condition.metric].value / len(seeds)
    what = "difference in " if condition.against else ""
    return f"{condition.because} ({what}{condition.metric} is {total:.3f})" if condition.holds(total) else None


def measure(name: str, method: str, claim: Claim, results: Results, job: Config) -> dict[str, Any]:
    """One row of the ledger."""
    row = {"method": method, "claim": name, "statement": claim.statement, "paper_value": claim.paper_value}
    empty = {"estimate": None, "ci_low": None, "ci_high": None, "n": None, "seeds": None}
    if claim.kind == "not_testable":
        return row | empty | Verdict("not testable here", claim.scope)._asdict()
    missing = [reference for reference in needed(claim) for s in seeds_of(claim, job) if not results.has(reference, s)]
    if missing:
        return row | empty | Verdict("not testable here", f"this tier has no {missing[0]}")._asdict()
    try:
        interval, n, verdict = MEASURES[claim.kind](claim, results, job)
    except Unmeasured as reason:
        return row | empty | Verdict("not testable here", str(reason))._asdict()
    reasons = (moot(condition, results, seeds_of(claim, job)) for condition in claim.moot_if)
    if because := next(filter(None, reasons), None):
        verdict = Verdict("not testable here", because)
    if claim.kind == "reversal" or (
        claim.kind in ("difference", "at_most") and claim.metric != "loss"
    ):  # a difference of shares ends at 1, which Student's quantile for few seeds does not know
        interval = Interval(interval.estimate, max(interval.low, -1.0), min(interval.high, 1.0))
    numbers = {
        "estimate": interval.estimate,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "n": n,
        "seeds": len(seeds_of(claim, job)),
    }
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
    for name in job.methods:
        if name not in claims:
            raise UserError(f"--methods: {job.claims} has no claims of '{name}'{nearest(name, claims)}")
    claims = {name: found for name, found in claims.items() if not job.methods or name in job.methods}
    rows = [measure(name, method, claim, results, job) for method, found in claims.items() for name, claim in found.items()]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"n": "Int64", "seeds": "Int64"})
    frame.to_parquet(job.output.with_suffix(".parquet"), index=False)
    manifest.write_atomically(job.output.with_suffix(".html"), to_html(rows))
    manifest.write_atomically(job.output, frame.to_csv(index=False, float_format="%.6g"))


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
