"""Loss of a checkpoint on held-out real text, per document, and recall of facts: what training makes the model forget."""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError
from posttrain.data.packed import recall


class Config(JobConfig):
    documents: int = key(64, help="test documents", gt=1)
    tokens: int = key(256, help="leading tokens of each document that are scored", gt=1)
    skip: int = key(0, help="leave out documents with no more tokens, and do not score the first ones: loss at long range", ge=0)
    dtype: str = key("float32", help="weights: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    batch: int = key(32, help="documents at once", gt=0)
    group: str = key("", help="a named model is evaluated on the named tasks of its group", role="runtime")
    facts: Path | None = key(None, help="facts manifest: their recall is measured too", role="input")
    model: Path = key(help="manifest of the checkpoint", role="input")
    corpus: Path = key(help="corpus manifest", role="input")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from posttrain.core.logprobs import token_logprobs

    manifest.read(job.corpus)
    tokenizer = models.load_tokenizer(job.model)
    model = models.place(models.load(job.model, job.dtype)).eval()
    documents = tables.read(job.corpus.parent / "documents.parquet", ["id", "source", "text"], [("split", "=", "test")])
    if job.skip:
        documents = [d for d in documents if len(d["text"]) > job.skip]  # a token has at least one character
    documents = documents[: job.documents]
    rows, first = [], max(1, job.skip)  # the first token of a document has nothing before it
    for start in range(0, len(documents), job.batch):
        part = documents[start : start + job.batch]
        encoded = tokenizer([d["text"] for d in part], add_special_tokens=False, truncation=True, max_length=job.tokens)[
            "input_ids"
        ]
        ids = pad_sequence([torch.tensor(e) for e in encoded], batch_first=True).to(model.device)
        mask = pad_sequence([torch.ones(len(e), dtype=torch.long) for e in encoded], batch_first=True).to(model.device)
        with torch.inference_mode():
            logp = token_logprobs(model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1], ids[:, 1:])
        sums = torch.where(mask[:, 1:].bool(), logp, 0.0)[:, first - 1 :].sum(1).tolist()
        for document, tokens, total in zip(part, encoded, sums, strict=True):
            if len(tokens) <= first:  # nothing to score
                continue
            shown = tokenizer.decode(tokens[first:], skip_special_tokens=True)
            rows.append(
                {
                    "id": document["id"],
                    "source": document["source"],
                    "nll": -total,
                    "tokens": len(tokens) - first,
                    "bytes": len(shown.encode()),
                }
            )
    if not rows:
        raise UserError(f"no test document of {job.corpus} has more than skip = {job.skip} tokens; lower skip or raise tokens.")
    file = tables.write(rows, job.folder / "documents.parquet")
    metrics = {
        "loss": manifest.metric([row["nll"] / row["tokens"] for row in rows]),
        "bits_per_byte": manifest.metric([row["nll"] / row["bytes"] / 0.6931471805599453 for row in rows]),
    }
    files = [file]
    if job.facts:
        manifest.read(job.facts)
        questions = tables.read(job.facts.parent / "items.parquet")
        known = recall(model, tokenizer, questions)
        metrics["fact_recall"] = manifest.metric(known)
        table = [{"id": q["id"], "hop": q["hop"], "recalled": k} for q, k in zip(questions, known, strict=True)]
        files.append(tables.write(table, job.folder / "facts.parquet"))
    manifest.publish(job, metrics, files)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
