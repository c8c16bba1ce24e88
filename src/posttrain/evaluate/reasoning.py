"""pass@1 and unbiased pass@k of a checkpoint on held-out items, by sampling and strict verification."""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.data import chat, verify
from posttrain.data.items import take


class Config(JobConfig):
    items: int = key(256, help="test items", gt=1)
    samples: int = key(16, help="samples per item (n)", gt=0)
    k: tuple[int, ...] = key((1, 8), help="values of k")
    temperature: float = key(1.0, help="sampling temperature", gt=0)
    max_new_tokens: int = key(48, help="longest response", gt=0)
    answer_style: verify.AnswerStyle = key("hash", help="how the answer is marked in a response")
    dtype: str = key("float32", help="weights: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    batch: int = key(1024, help="sequences at once (takes part in which random numbers a sequence gets)", gt=0)
    families: tuple[str, ...] = key((), help="take items of these families alone, as many of each; empty: all")
    group: str = key("", help="a named model is evaluated on the named tasks of its group", role="runtime")
    model: Path = key(help="manifest of the checkpoint", role="input")
    task: Path = key(help="task manifest", role="input")

    def model_post_init(self, _context) -> None:
        if not self.k or max(self.k) > self.samples:
            raise ValueError(f"k = {list(self.k)} needs at least {max(self.k, default=1)} samples, samples is {self.samples}")


UNGATED: dict[str, verify.AnswerStyle] = {"think": "think_optional"}  # the same answer without the demand on the format


def main(job: Config) -> None:
    determinism.setup(job.seed)
    from posttrain.core.generation import sample
    from posttrain.core.stats import pass_at_k

    manifest.read(job.task)
    tokenizer = models.load_tokenizer(job.model)
    model = models.place(models.load(job.model, job.dtype))
    items = take(tables.read(job.task.parent / "items.parquet", None, [("split", "=", "test")]), job.families, job.items)
    prompts = [chat.prompt_ids(tokenizer, item["prompt"]) for item in items]
    drawn = sample(
        model,
        tokenizer,
        prompts,
        count=job.samples,
        max_new_tokens=job.max_new_tokens,
        seed=derive(job.seed, "evaluate"),
        temperature=job.temperature,
        batch=job.batch,
    )
    rows = []
    for item, responses in zip(items, drawn, strict=True):
        right = [verify.correct(r.text, item["answer"], job.answer_style) for r in responses]
        free = [verify.correct(r.text, item["answer"], UNGATED.get(job.answer_style, job.answer_style)) for r in responses]
        rows.append(
            {
                "id": item["id"],
                "family": item["family"],
                "prompt": item["prompt"],
                "answer": item["answer"],
                "n": len(right),
                "correct": sum(right),
                "correct_ungated": sum(free),
                "finished": sum(r.finished for r in responses),
                "tokens": sum(len(r.ids) for r in responses),
                "first_response": responses[0].text,
            }
        )
    file = tables.write(rows, job.folder / "items.parquet")
    metrics = {f"pass@{k}": manifest.metric(pass_at_k([r["n"] for r in rows], [r["correct"] for r in rows], k)) for k in job.k}
    metrics["finished"] = manifest.metric([row["finished"] / row["n"] for row in rows])
    metrics["response_tokens"] = manifest.metric([row["tokens"] / row["n"] for row in rows])
    if job.answer_style in UNGATED:  # what the model knows, whether or not it keeps to the format
        metrics["ungated"] = manifest.metric([row["correct_ungated"] / row["n"] for row in rows])
    for family in sorted({row["family"] for row in rows}):
        part = [row["correct"] / row["n"] for row in rows if row["family"] == family]
        metrics[f"pass@1/{family}"] = manifest.metric(part)
    manifest.publish(job, metrics, [file])


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
