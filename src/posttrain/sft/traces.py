"""Stored traces: prompt, response and the behaviour policy's log-probability of every response token.

Sources: `policy` (a known mixture of two styles), `teacher` (sampled from a model of the DAG at temperature 1, scored by
it), `dataset` (a hub data set with responses of a known generator, scored by that generator's weights).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.core import cli, determinism, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import chat, verify

COLUMNS = ("prompt_ids", "response_ids", "logp_beta", "top_ids", "top_logps")


class Config(JobConfig):
    source: Literal["policy", "teacher", "dataset"] = key(help="where responses come from")
    train: int = key(3840, help="prompts of the training split", gt=0)
    validation: int = key(256, help="prompts of the validation split", gt=0)
    share_b: float = key(0.8, help="policy: probability of style B", gt=0, lt=1)
    top: int = key(2, help="entries of the behaviour distribution stored per token (for KL distillation)", gt=0)
    max_new_tokens: int = key(48, help="teacher: longest response", gt=0)
    keep_wrong: bool = key(False, help="keep traces whose answer is wrong (for negative weights)")
    repo: str | None = key(None, help="dataset: hub id")
    revision: str | None = key(None, help="dataset: commit (40 hex digits)", pattern="^[0-9a-f]{40}$")
    fields: dict[str, str] = key({}, help="dataset: our name (prompt, response, answer) -> column")
    answer_style: verify.AnswerStyle = key("hash", help="how the answer is marked in a response")
    batch: int = key(1024, help="sequences at once (takes part in which random numbers a sequence gets)", gt=0)
    tokenizer: Path = key(help="manifest of the student, for its tokenizer", role="input")
    task: Path | None = key(None, help="policy, teacher: task manifest", role="input")
    teacher: Path | None = key(None, help="teacher, dataset: manifest of the behaviour model", role="input")


def check(rows: list[dict[str, Any]], where: Path) -> None:
    """Each response token has exactly one finite behaviour log-probability <= 0, or the row is named."""
    for i, row in enumerate(rows):
        n, m = len(row["response_ids"]), len(row["logp_beta"])
        if n != m:
            raise UserError(
                f"{where} row {i}: {m} behaviour log-probabilities for {n} response tokens; score these traces again with the generator's own tokenizer."
            )
        if not n or not row["prompt_ids"]:
            raise UserError(f"{where} row {i}: empty prompt or response; drop this row.")
        if not all(math.isfinite(v) and v <= 1e-4 for v in row["logp_beta"]):
            raise UserError(f"{where} row {i}: a behaviour log-probability is not finite or above 0; score these traces again.")


def policy_trace(tokenizer, item: dict[str, Any], share_b: float, top: int, rng: random.Random) -> dict[str, Any]:
    """One response of the known two-style policy: only its first token is random."""
    style_b = rng.random() < share_b
    prompt, response = chat.render(tokenizer, item["prompt"], item["alternative" if style_b else "demonstration"])
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    pad = top - 1
    logps = [math.log(share_b if style_b else 1 - share_b)] + [0.0] * (len(response) - 1)
    first_ids = ([a, b] + [0] * top)[:top]
    first_logps = ([math.log(1 - share_b), math.log(share_b)] + [-math.inf] * top)[:top]
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "logp_beta": logps,
        "top_ids": [first_ids] + [[t] + [0] * pad for t in response[1:]],
        "top_logps": [first_logps] + [[0.0] + [-math.inf] * pad for _ in response[1:]],
        "correct": True,
        "response": tokenizer.decode(response, skip_special_tokens=True),
    }


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices by rising length, in groups whose padded size stays within `tokens` (one sequence at least): logits over a
    large vocabulary, not sequences, are what fills a card."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if part and (len(part) + 1) * lengths[i] > tokens:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def score(model, rows: list[dict[str, Any]], top: int, tokens: int = 16_384) -> None:
    """Add logp_beta (float32 nats, one per response token) and the `top` largest log-probabilities, in place."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    for group in batches([len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows], tokens):
        part = [rows[i] for i in group]
        full = [torch.tensor(row["prompt_ids"] + row["response_ids"]) for row in part]
        ids = torch.nn.utils.rnn.pad_sequence(full, batch_first=True).to(model.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(f) for f in full], batch_first=True).to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, line in zip(part, logits, strict=True):
            p, n = len(row["prompt_ids"]), len(row["response_ids"])
            at = line[p - 1 : p - 1 + n]
            row["logp_beta"] = token_logprobs(at, torch.tensor(row["response_ids"], device=at.device)).clamp(max=0).tolist()
            best = at.float().log_softmax(-1).topk(min(top, at.shape[-1]), -1)
            row["top_ids"], row["top_logps"] = best.indices.tolist(), best.values.tolist()


def sampled(job: Config, items: list[dict[str, Any]], tokenizer, model, split: str) -> list[dict[str, Any]]:
    """Teacher responses that ended in EOS, scored; wrong ones are dropped unless `keep_wrong`."""
    from posttrain.core.generation import sample

    prompts = [chat.prompt_ids(tokenizer, item["prompt"]) for item in items]
    seed = derive(job.seed, "traces", split)
    drawn = sample(model, tokenizer, prompts, count=1, max_new_tokens=job.max_new_tokens, seed=seed, batch=job.batch)
    rows = []
    for item, prompt, (one,) in zip(items, prompts, drawn, strict=True):
        right = one.finished and verify.correct(one.text, item["answer"], job.answer_style)
        if one.finished and (right or job.keep_wrong):
            rows.append({"prompt_ids": prompt, "response_ids": one.ids, "correct": right, "response": one.text})
    score(model, rows, job.top)
    return rows


def first(cell: Any) -> str:
    """A cell as text; of a list of responses the first, of an empty list nothing."""
    return str(next(iter(cell), "")) if isinstance(cell, list | tuple) else str(cell)


def from_hub(job: Config, tokenizer, model) -> dict[str, list[dict[str, Any]]]:
    """Rows of a hub data set, rendered and scored by the generator that wrote them."""
    from datasets import load_dataset

    if job.repo is None or job.revision is None:
        raise UserError("source: dataset needs repo and revision; run `make pin` once with network access.")
    count = job.train + job.validation
    stream = load_dataset(job.repo, revision=job.revision, split="train", streaming=True)
    rows = []
    for i, entry in enumerate(stream):
        if len(rows) == count:
            break
        try:
            values = {name: first(entry[column]) for name, column in job.fields.items()}
        except KeyError as error:
            raise UserError(
                f"{job.repo} row {i} has no column {error}; correct `fields` (columns: {', '.join(sorted(entry))})."
            ) from None
        if not values["response"].strip():
            continue
        prompt, response = chat.render(tokenizer, values["prompt"], values["response"])
        right = "answer" not in values or verify.correct(values["response"], values["answer"], job.answer_style)
        if right or job.keep_wrong:
            rows.append({"prompt_ids": prompt, "response_ids": response, "correct": right, "response": values["response"]})
    if len(rows) <= job.validation:
        raise UserError(f"{job.repo} gave {len(rows)} usable rows, {count} are wanted; lower train or validation.")
    score(model, rows, job.top)
    return {"validation": rows[: job.validation], "train": rows[job.validation :]}


def main(job: Config) -> None:
    determinism.setup(job.seed)
    from posttrain.core import models

    manifest.read(job.tokenizer)
    tokenizer = models.load_tokenizer(job.tokenizer)
    model = None
    if job.source != "policy":
        if job.teacher is None:
            raise UserError(f"source: {job.source} needs --teacher, the model that wrote the traces.")
        model = models.place(models.load(job.teacher))
        if models.load_tokenizer(job.teacher).get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"{job.teacher} and {job.tokenizer} have different vocabularies; ratios between them are undefined, choose one family."
            )
    if job.source == "dataset":
        splits = from_hub(job, tokenizer, model)
    else:
        if job.task is None:
            raise UserError(f"source: {job.source} needs --task, a task manifest.")
        manifest.read(job.task)
        splits = {}
        for split, count in (("train", job.train), ("validation", job.validation)):
            items = tables.read(job.task.parent / "items.parquet", None, [("split", "=", split)])[:count]
            if model is None:
                rng = random.Random(derive(job.seed, "traces", split))
                splits[split] = [policy_trace(tokenizer, item, job.share_b, job.top, rng) for item in items]
            else:
                splits[split] = sampled(job, items, tokenizer, model, split)
    rows = [{"split": split, **row} for split, part in splits.items() for row in part]
    if not rows:
        raise UserError("no trace was kept; the teacher answers nothing correctly: train it longer or set keep_wrong.")
    file = job.folder / "traces.parquet"
    check(rows, file)
    tables.write(rows, file)
    metrics = {f"traces/{split}": len(part) for split, part in splits.items()}
    metrics["correct"] = manifest.metric([row["correct"] for row in rows])
    if job.source == "teacher":
        metrics["kept_share"] = len(rows) / (job.train + job.validation)
    metrics["logp_beta_per_trace"] = manifest.metric([sum(row["logp_beta"]) for row in rows])
    metrics["response_tokens"] = manifest.metric([len(row["response_ids"]) for row in rows])
    manifest.publish(job, metrics, [file], card={"examples": [row["response"] for row in rows[:3]]})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
