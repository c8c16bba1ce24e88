"""How many of n sampled answers to each training prompt are right: the filter for RL prompts and the solvability frontier.

PRISM (arXiv 2603.17074) samples 16 answers per prompt from one named checkpoint at T = 1, top-p 1, and trains on prompts with
exactly one right answer (mathematics) or at least one (code, science). Prompts so chosen favour that checkpoint's lineage,
which is why it is named and its manifest is an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import chat, verify
from posttrain.data.items import take


class Config(JobConfig):
    prompts: int = key(1024, help="training prompts, from the first on", gt=0)
    families: tuple[str, ...] = key((), help="take prompts of these families alone, equally many of each; empty: all")
    samples: int = key(16, help="answers per prompt (n)", gt=0)
    temperature: float = key(1.0, help="sampling temperature (no top-p, no top-k)", gt=0)
    max_new_tokens: int = key(48, help="longest response", gt=0)
    answer_style: verify.AnswerStyle = key("hash", help="how the answer is marked in a response")
    shuffle: bool = key(
        False, help="control: give the counts to other prompts of their family, so that a filter chooses by chance"
    )
    dtype: str = key("float32", help="weights: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    batch: int = key(1024, help="sequences at once (takes part in which random numbers a sequence gets)", gt=0)
    model: Path = key(help="manifest of the checkpoint that is sampled from", role="input")
    task: Path = key(help="task manifest", role="input")


def select(
    counts: Sequence[int] | np.ndarray,
    *,
    exact: int | None = None,
    at_least: int | None = None,
    size: int | None = None,
    top_up: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Indices, ascending int64, of the prompts whose number of right answers passes the filter.

    counts: int [prompts]. Give `exact` or `at_least`. size: how many prompts are wanted; if more pass, a seeded draw without
    replacement; if fewer, a draw from those with exactly `top_up` right answers fills up (the paper's balanced mix:
    size=19000, top_up=0). Raises :class:`UserError` if too few are left, so that a mix is never smaller than it says.
    """
    counts = np.asarray(counts, dtype=np.int64)
    if (exact is None) == (at_least is None):
        raise UserError("give either exact or at_least, the number of right answers that a prompt needs.")
    passing = counts == exact if exact is not None else counts >= at_least
    chosen = np.flatnonzero(passing)
    if size is None:
        return chosen
    rng = np.random.default_rng(seed)
    if len(chosen) > size:
        return np.sort(rng.choice(chosen, size, replace=False))
    missing = size - len(chosen)
    spare = np.flatnonzero(~passing & (counts == top_up)) if top_up is not None else np.empty(0, dtype=np.int64)
    if missing > len(spare):
        raise UserError(
            f"size = {size} prompts are wanted, {len(chosen)} pass the filter and {len(spare)} can top them up; "
            "sample more prompts or lower size."
        )
    return np.sort(np.concatenate([chosen, rng.choice(spare, missing, replace=False)]))


def frontier(
    start: Sequence[Mapping[str, Any]], steps: Mapping[int, Sequence[Mapping[str, Any]]], *, correct: int
) -> list[dict[str, float]]:
    """Pass rate over RL steps of the prompts that had exactly `correct` right answers at RL start.

    start: rows {id, n, correct} (of passes.parquet); steps: RL step -> such rows of that checkpoint. Returns rows {step,
    pass_rate, n, se} in order of steps; n counts prompts, se is None for a single one. The draws of `start` choose the
    prompts, so they are no point of the curve: prompts with 0 right answers out of 16 have a pass rate above 0. The curve's
    first point is a second draw from the same checkpoint (another seed) as step 0. Raises :class:`UserError` if no prompt
    had that many, or if a step lacks one.
    """
    chosen = [row["id"] for row in start if row["correct"] == correct]
    if not chosen:
        raise UserError(f"no prompt had exactly {correct} right answers at the start; choose another number.")
    found = []
    for step, rows in sorted(steps.items()):
        rates = {row["id"]: row["correct"] / row["n"] for row in rows}
        if missing := [one for one in chosen if one not in rates]:
            raise UserError(f"step {step} has no counts for prompt {missing[0]} of the start; sample the same prompts.")
        value = manifest.metric([rates[one] for one in chosen])
        found.append({"step": step, "pass_rate": value.value, "n": value.n, "se": value.se})
    return found


def shuffled(rows: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The rows with their counts permuted among the prompts of a family: any filter keeps as many, chosen by chance."""
    rng, found = np.random.default_rng(seed), [dict(row) for row in rows]
    for family in sorted({row["family"] for row in rows}):
        part = [row for row in found if row["family"] == family]
        counts = [row["correct"] for row in part]
        for row, i in zip(part, rng.permutation(len(part)), strict=True):
            row["correct"] = counts[i]
    return found


def measures(rows: Sequence[Mapping[str, Any]]) -> dict[str, manifest.Metric]:
    """Mean pass rate, in total and per family, and the shares of prompts with no, one and only right answers."""
    found = {"pass_rate": manifest.metric([row["correct"] / row["n"] for row in rows])}
    for family in sorted({row["family"] for row in rows}):
        part = [row["correct"] / row["n"] for row in rows if row["family"] == family]
        found[f"pass_rate/{family}"] = manifest.metric(part)
    found["share/none"] = manifest.metric([row["correct"] == 0 for row in rows])
    found["share/one"] = manifest.metric([row["correct"] == 1 for row in rows])
    found["share/all"] = manifest.metric([row["correct"] == row["n"] for row in rows])
    return found


def main(job: Config) -> None:
    """Writes passes.parquet: id, family, n, correct. Counts are those of the prompts themselves unless `shuffle`."""
    determinism.setup(job.seed)
    from posttrain.core.generation import sample

    manifest.read(job.task)
    tokenizer = models.load_tokenizer(job.model)
    model = models.place(models.load(job.model, job.dtype))
    items = take(tables.read(job.task.parent / "items.parquet", None, [("split", "=", "train")]), job.families, job.prompts)
    drawn = sample(
        model,
        tokenizer,
        [chat.prompt_ids(tokenizer, item["prompt"]) for item in items],
        count=job.samples,
        max_new_tokens=job.max_new_tokens,
        seed=derive(job.seed, "passes"),
        temperature=job.temperature,
        batch=job.batch,
    )
    rows = []
    for item, responses in zip(items, drawn, strict=True):
        right = sum(verify.correct(one.text, item["answer"], job.answer_style) for one in responses)
        rows.append({"id": item["id"], "family": item["family"], "n": len(responses), "correct": right})
    metrics = measures(rows)
    if job.shuffle:
        rows = shuffled(rows, derive(job.seed, "shuffle"))
    metrics["finished"] = manifest.metric([sum(r.finished for r in responses) / len(responses) for responses in drawn])
    manifest.publish(job, metrics, [tables.write(rows, job.folder / "passes.parquet")])


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
