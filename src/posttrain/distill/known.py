"""Distillation from known sources: every metric is exact, because the source is the teacher.

One job is one arm, with R replicates that are paired across arms: replicate r has its own source (`distill/source`), sequences
and initialisation, the same whatever the arm. Student: a small GPT on sequences of a source; loss: ce_weight x cross-entropy on
the sampled token + weight x divergence, mean over tokens, as in TAD (arXiv 2602.20816 through public notes; this study is the
paper card's, tail-kd). The learning rate of an arm is the one of `rates` with the lowest forward KL on validation sequences of a
source that no replicate has; each replicate is judged on test sequences of its own source, at that rate and at common_rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import cli, determinism, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.distill import metrics, stacked
from posttrain.distill import source as sources
from posttrain.distill.divergences import Divergence, loss

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = (*metrics.NAMES, "ce", "fece", "grad_norm", "log_kl", "log_kl2")  # logarithms: their differences are ratios


class Setup(JobConfig):
    """Student, data and budget."""

    replicates: int = key(5, help="paired replicates, each on its own source", gt=1)
    width: int = key(24, help="width of the student", gt=0)
    layers: int = key(1, help="blocks of the student", gt=0)
    heads: int = key(4, help="attention heads of the student", gt=0)
    length: int = key(32, help="tokens of a sequence", gt=0)
    steps: int = key(250, help="optimizer steps", gt=0)
    batch_size: int = key(16, help="sequences per step", gt=0)
    ce_weight: float = key(1.0, help="weight of the cross-entropy on sampled tokens", ge=0)
    weight: float = key(1.0, help="weight of the divergence", ge=0)
    held_out: int = key(64, help="sequences on which a rate is chosen, and as many others on which arms are judged", gt=0)
    head: int = key(10, help="K of the measured decomposition, the same for all arms", gt=0)
    common_rate: float | None = key(2e-3, help="learning rate at which the arm is judged as well; null: at its own alone", gt=0)
    source: Path = key(help="manifest of the known sources", role="input")

    def model_post_init(self, _context: Any) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}; change one of them")


class Config(Setup):
    divergence: Divergence = key(Divergence(), help="what pulls the student to the teacher; kind none: cross-entropy alone")
    rates: list[float] = key([1e-3, 2e-3, 5e-3, 1e-2], help="learning rates among which an arm's own is chosen", min_length=1)


def objective(job: Setup, divergence: Divergence, teacher: Tensor, logits: Tensor, following: Tensor) -> Tensor:
    """Sum over M models of each one's mean loss per token. teacher, logits: [M, B, T, V]; following: int64 [M, B, T]."""
    m, b, t, v = logits.shape
    labels = following.reshape(m * b, t)
    each, _ = loss(
        teacher.reshape(m * b, t, v),
        logits.reshape(m * b, t, v),
        labels >= 0,
        divergence,
        labels=labels,
        weight=job.weight,
        ce_weight=job.ce_weight,
    )
    return each.sum() / (b * t)


def train(job: Setup, divergence: Divergence, known: Tensor, runs: Sequence[tuple[int, float]]) -> tuple[stacked.Weights, Tensor]:
    """(weights, mean gradient norm [M]) of M runs (replicate, learning rate) on sources [S, V, V]."""
    import torch

    vocabulary = known.shape[-1]
    seeds = [derive(job.seed, "student", r) for r, _ in runs]
    weights = stacked.initial(vocabulary, job.length, job.width, job.layers, seeds)
    optimizer = stacked.Adam(weights, [rate for _, rate in runs])
    used = sorted({r for r, _ in runs})
    drawn = {r: sources.draw(known[r], job.steps * job.batch_size, job.length, derive(job.seed, "train", r)) for r in used}
    norms = torch.zeros(len(runs))
    for step in range(job.steps):
        rows = slice(step * job.batch_size, (step + 1) * job.batch_size)
        tokens = torch.stack([drawn[r][rows] for r, _ in runs])
        teacher = torch.stack([known[r][tokens[m, :, :-1]] for m, (r, _) in enumerate(runs)])
        logits = stacked.forward(weights, tokens[:, :, :-1], job.heads)
        objective(job, divergence, teacher, logits, tokens[:, :, 1:]).backward()
        norms += optimizer.step()
    return weights, norms / job.steps


def judge(job: Setup, weights: stacked.Weights, known: Tensor, runs: Sequence[tuple[int, float]], split: str) -> list[dict]:
    """Per run the means over positions of what `metrics.compare` gives, ce, fece, and `masses` [buckets][2]."""
    import torch

    found = []
    with torch.no_grad():
        seen = [sources.draw(known[r], job.held_out, job.length, derive(job.seed, split, r))[:, :-1] for r, _ in runs]
        outputs = stacked.forward(weights, torch.stack(seen), job.heads)
        for (r, rate), tokens, logits in zip(runs, seen, outputs, strict=True):
            if not torch.isfinite(logits).all():
                raise UserError(f"replicate {r} at learning rate {rate:g} diverged; take that rate out of rates.")
            teacher, student = known[r][tokens].flatten(0, 1), logits.flatten(0, 1)
            values, masses = metrics.compare(teacher, student, job.head)
            row: dict[str, Any] = {name: float(value.mean()) for name, value in values.items()}
            row["ce"] = float((values["kl"] + values["entropy_t"]).mean())
            sums = metrics.calibration(student.double().softmax(-1), teacher.double().softmax(-1))
            row["fece"] = metrics.full_ece(sums, len(teacher))
            row |= {f"log_{name}": math.log(row[name]) if row[name] > 0 else -math.inf for name in ("kl", "kl2")}
            found.append(row | {"masses": masses.mean(0).tolist()})
    return found


def choose(job: Config, known: Tensor) -> tuple[float, list[dict[str, float]]]:
    """The rate with the lowest forward KL on validation sequences of the last source, and what each gave."""
    if len(job.rates) == 1:
        return job.rates[0], []
    runs = [(len(known) - 1, rate) for rate in job.rates]
    weights, _ = train(job, job.divergence, known, runs)
    tried = [
        {"rate": rate, "kl": row["kl"]}
        for (_, rate), row in zip(runs, judge(job, weights, known, runs, "validation"), strict=True)
    ]
    return min(tried, key=lambda one: one["kl"])["rate"], tried


def check_sources(job: Setup, known: Tensor) -> None:
    if len(known) <= job.replicates:
        raise UserError(
            f"{job.source} has {len(known)} sources for {job.replicates} replicates and one for choosing rates; raise its count to {job.replicates + 1}."
        )
    if job.head >= known.shape[-1] - 1:
        raise UserError(f"head = {job.head} leaves no tail of {known.shape[-1]} tokens; lower it.")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    known = sources.read(job.source)
    check_sources(job, known)
    arm = manifest.identity(job.output)[2]
    own, tried = choose(job, known)
    runs = [(r, own) for r in range(job.replicates)]
    if job.common_rate not in (None, own):
        runs += [(r, job.common_rate) for r in range(job.replicates)]
    weights, norms = train(job, job.divergence, known, runs)
    rows, masses = [], []
    for (r, rate), row, norm in zip(runs, judge(job, weights, known, runs, "test"), norms.tolist(), strict=True):
        found = row.pop("masses")
        for name in [n for n, value in (("own", own), ("common", job.common_rate)) if value == rate]:
            rows.append({"arm": arm, "replicate": r, "rate": name, "learning_rate": rate, **row, "grad_norm": norm})
            masses += [
                {"arm": arm, "replicate": r, "rate": name, "low": a, "high": b, "teacher": t, "student": s}
                for (a, b), (t, s) in zip(metrics.buckets(known.shape[-1]), found, strict=True)
            ]
    rows.sort(key=lambda row: (row["rate"] != "own", row["replicate"]))
    files = [tables.write(rows, job.folder / "replicates.parquet"), tables.write(masses, job.folder / "buckets.parquet")]
    if tried:
        files.append(tables.write(tried, job.folder / "rates.parquet"))
    measured: dict[str, Any] = {
        f"{name}/{rate}": manifest.metric([row[name] for row in rows if row["rate"] == rate])
        for name in COLUMNS
        for rate in dict.fromkeys(row["rate"] for row in rows)
    }
    measured["learning_rate"] = own
    measured["parameters"] = sum(value[0].numel() for value in weights.values())
    manifest.publish(job, measured, files)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
