"""Write edits into a model, CrispEdit's way or a baseline's, and measure what they did and what they damaged.

Edits of your own need no manifest: give `--edits` a .jsonl (or .json) file, one object per line with subject, prompt and
target, optionally gold, paraphrases, locality and neighbours; zsRE, CounterFact and WikiBigEdit files are read as published:

    python -m posttrain.edit.crispedit --edits mine.jsonl --model <manifest> --capability <manifest of a corpus> \
        --layers '["model.layers.1[2-4].mlp.down_proj"]' --output out/edit/crispedit/mine/seed0/manifest.json
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError
from posttrain.edit import capability, kfac, scores
from posttrain.edit.editors import Settings, Stats, edit
from posttrain.edit.edits import Faults, Format
from posttrain.edit.edits import read as read_edits
from posttrain.edit.factors import FILE
from posttrain.edit.layers import choose, copies


class Config(Settings, JobConfig):
    format: Format = key("auto", help="of the edits' file; auto: by the fields of the first edit")
    count: int | None = key(None, help="take the first edits alone; null: all", gt=0)
    faulty: Literal["stop", "drop"] = key(
        "stop",
        help="rows that cannot be edits, evaluation prompts that are edited: end the job, or leave them out and count them",
    )
    texts: int = key(64, help="documents of the capability text (train split) behind the factors", gt=0)
    tokens: int = key(512, help="leading tokens of each", gt=1)
    text_batch: int = key(8, help="documents at once", gt=0)
    drift_texts: int = key(64, help="held-out documents (test split) on which drift is measured, of each source named", gt=0)
    drift_tokens: int = key(256, help="leading tokens of each", gt=1)
    drift_sources: tuple[str, ...] = key((), help="sources of the corpus that drift is measured on; empty: the first documents")
    measure: Literal["facts", "refusals"] = key(
        "facts", help="facts: answers; refusals: does it decline, and only what it should"
    )
    context: str = key("{}", help="text around a prompt in free generation, with {} for the prompt (the paper's QA context)")
    preferences: bool = key(True, help="facts: also compare the probabilities of new and old answer (CounterFact's scores)")
    max_new_tokens: int = key(40, help="longest free answer", gt=0)
    score_batch: int = key(64, help="prompts at once when measuring", gt=0)
    dtype: str = key("float32", help="weights: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    model: Path = key(help="manifest of the checkpoint to edit", role="input")
    edits: Path = key(help="manifest of a data/edits job, or a .jsonl or .json file of edits", role="input")
    capability: Path = key(help="manifest of a corpus: train split behind the factors, test split for drift", role="input")
    factors: Path | None = key(
        None, help="manifest of an edit/factors job of this model; null: factors are computed here", role="input"
    )

    def model_post_init(self, _context) -> None:
        if self.context.count("{}") != 1:
            raise ValueError("context should hold {} once, where the prompt goes")
        if self.measure == "refusals" and not self.chat:
            raise ValueError("measure refusals needs chat true, because requests are user turns; set it")


def edits_file(path: Path) -> Path:
    """The file of edits itself, or the one beside a manifest."""
    if path.name != manifest.NAME:
        return path
    names = [name for name in manifest.read(path).artifacts if name.endswith(".jsonl")]
    if len(names) != 1:
        raise UserError(
            f"{path} has {len(names)} .jsonl files beside it, not one; give the manifest of a data/edits job, or a file."
        )
    return path.parent / names[0]


def timings(stats: Stats, seconds: float) -> dict[str, float]:
    """Seconds, and the time of a step over the same step without projection (the share spent on projecting taken out)."""
    stepping = sum(stats.step_seconds)
    middle = sorted(stats.step_seconds)[len(stats.step_seconds) // 2] if stats.step_seconds else 0.0
    found = {"factors": stats.factoring, "edit": seconds - stats.factoring, "step": middle, "projecting": stats.projecting}
    if stepping > stats.projecting:
        found["step_over_unprojected"] = stepping / (stepping - stats.projecting)
    return found


def main(job: Config) -> None:
    """Writes `model/`, edits.parquet (one row per edit), drift.parquet (one row per text), for refusals responses.parquet."""
    determinism.setup(job.seed)
    tokenizer = models.load_tokenizer(job.model)
    faults = Faults(drop=job.faulty == "drop")
    file = edits_file(job.edits)
    rows = scores.encodable(tokenizer, read_edits(file, job.format, job.count, faults), job.style, faults)
    faults.report(file)
    questions = scores.Questions(tokenizer, rows, job)  # every edit is encoded before any work: a bad row costs nothing
    model = models.place(models.load(job.model, job.dtype)).eval()
    chosen = choose(model, job.layers)
    texts = capability.read(job.capability, "train", tokenizer, job.texts, job.tokens)
    held = capability.read(job.capability, "test", tokenizer, job.drift_texts, job.drift_tokens, job.drift_sources)
    if both := {t.ids for t in texts} & {t.ids for t in held}:
        example = tokenizer.decode(list(next(iter(both))))[:40]
        raise UserError(
            f"{len(both)} texts of {job.capability} are in its train and its test split ({example!r}); drift must be measured on "
            "text that is not behind the factors: rebuild the corpus with disjoint splits."
        )
    known = [row.edit for row in rows]
    stated = capability.warn_of_edits(known, texts, tokenizer, job.capability)
    ready = None
    if job.factors and job.needs_factors:
        manifest.read(job.factors)
        ready = kfac.load(job.factors.parent / FILE, model, chosen, [t.ids for t in texts], job.labels)
    before, original = questions.ask(model), copies(chosen)

    began = time.perf_counter()
    stats = edit(
        model, tokenizer, rows, job, texts=[t.ids for t in texts], factors=ready, seed=job.seed, text_batch=job.text_batch
    )
    seconds = time.perf_counter() - began

    after = questions.ask(model)
    table, metrics = questions.score(before, after)
    drift, more = scores.drift_table(model, chosen, original, held, job.text_batch)
    moved = {
        name: ((layer.weight - original[name]).float().norm() / original[name].float().norm()).item()
        for name, layer in chosen.items()
    }
    metrics |= more | {
        "edit/loss": stats.loss,
        "edit/steps": stats.steps,
        "edit/epochs": stats.epochs,
        "edit/skipped": stats.skipped,
        "edit/refreshes": stats.refreshes,
        "edit/moved": max(moved.values()),
        "capability_texts_with_edits": stated,
    }
    if stats.free:
        metrics["edit/free_directions"] = sum(stats.free.values()) / len(stats.free)
    files = models.save(model, tokenizer, job.folder)
    files += [tables.write(table, job.folder / "edits.parquet"), tables.write(drift, job.folder / "drift.parquet")]
    if questions.responses:
        files.append(tables.write(questions.responses, job.folder / "responses.parquet"))
    card: dict[str, Any] = {"layers": moved, "losses": stats.losses[:400], "edits": len(rows), "texts": len(texts)}
    if faults.drop:
        card["dropped"] = {"edits": faults.rows, "prompts": faults.prompts}
    manifest.publish(job, metrics, files, card=card, timings=timings(stats, seconds))


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
