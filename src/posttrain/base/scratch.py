"""A small Llama-architecture decoder, trained from scratch on a token mix through the Transformers trainer."""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.tracking import Tracker
from posttrain.core.training import TrainingConfig, arguments, discard_checkpoints, make_callback, save_trained, train
from posttrain.data import packing


class Config(TrainingConfig):
    shape: models.Shape = key(models.Shape(), help="size of the decoder")
    length: int = key(256, help="tokens per packed row", gt=1)
    mix: Path = key(help="token mix manifest", role="input")
    tokenizer: Path = key(help="tokenizer manifest", role="input")


def rows(mix: Path, split: str, length: int, pad: int) -> list[dict]:
    """Packed rows of one split as a list of {input_ids, position_ids, labels}, each int64 [length]."""
    import torch

    documents = [
        row["input_ids"] for row in tables.read(mix.parent / "documents.parquet", ["input_ids"], [("split", "=", split)])
    ]
    packed = {name: torch.from_numpy(array) for name, array in packing.pack(documents, length, pad).items()}
    return [{name: array[i] for name, array in packed.items()} for i in range(len(packed["input_ids"]))]


def held_out_loss(model, data: list[dict], batch: int = 32) -> tuple[float, int]:
    """(mean negative log-likelihood in nats per target token, number of target tokens) over packed rows."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    total, count = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(data), batch):
            part = {k: torch.stack([row[k] for row in data[start : start + batch]]) for k in data[0]}
            labels = part["labels"][:, 1:]
            logits = model(
                input_ids=part["input_ids"].to(model.device), position_ids=part["position_ids"].to(model.device), use_cache=False
            ).logits[:, :-1]
            valid = labels != packing.IGNORE
            total -= token_logprobs(logits[valid], labels[valid].to(logits.device)).double().sum().item()
            count += int(valid.sum())
    return total / count, count


def main(job: Config) -> None:
    determinism.setup(job.seed)
    from transformers import Trainer, TrainingArguments

    manifest.read(job.mix)
    manifest.read(job.tokenizer)
    tokenizer = models.load_tokenizer(job.tokenizer)
    model = models.scratch(job.shape, tokenizer)
    model.config.use_cache = False
    tracker = Tracker(job)
    callback = make_callback(job, tracker)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments(job)),
        train_dataset=rows(job.mix, "train", job.length, tokenizer.pad_token_id),
        callbacks=[callback],
    )
    train(trainer, job, tracker, callback)
    loss, count = held_out_loss(model, rows(job.mix, "validation", job.length, tokenizer.pad_token_id))
    metrics = {"validation/loss": manifest.Metric(value=loss, n=count), "parameters": model.num_parameters()}
    files = save_trained(trainer, tokenizer, job)
    tracker.finish({"validation/loss": loss})
    manifest.publish(job, metrics, [*files, tracker.path])
    discard_checkpoints(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
