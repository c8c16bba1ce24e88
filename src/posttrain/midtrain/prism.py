"""Mid-training of PRISM: continued next-token training of a base on a mix of general text and reasoning domains.

arXiv 2603.17074. The mix is data (`data/mix`), so M, MC, MCS and controls differ in the mix alone. All tokens are targets,
documents are packed to `length`. The retention curve, held-out loss of every source of the mixes and recall of facts over
the steps, is part of the result. The long-context stage is the same job on long documents, from a merged model
(`midtrain/merge`), with all tensors or those of attention alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from posttrain.core import cli, determinism, distributed, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.errors import UserError
from posttrain.core.tracking import Tracker
from posttrain.core.training import TrainingConfig, arguments, discard_checkpoints, follow, make_callback, save_trained, train
from posttrain.data.packed import held_out_loss, recall, rows
from posttrain.data.streams import StreamConfig, TokenStream


class Config(TrainingConfig):
    length: int = key(256, help="tokens per packed row", gt=1)
    overlap: int = key(0, help="tokens that the chunks of an over-long document share; 0: it is cut without", ge=0)
    order: int = key(0, help="another number: the rows of mix in another order", ge=0)
    trainable: Literal["all", "attention"] = key("all", help="tensors that are trained")
    measure_every: int = key(100, help="steps between points of the retention curve", gt=0)
    measure_rows: int = key(16, help="held-out rows of each source at a point of the curve", gt=0)
    start: Path = key(help="manifest of the model to start from", role="input")
    stream: StreamConfig | None = key(None, help="instead of mix: sources that are read while training, by hub id or path")
    mix: Path | None = key(None, help="token mix manifest", role="input")
    held_out: Path | None = key(
        None, help="mix whose validation split gives the curve, the same for all arms; null: mix, if there is one", role="input"
    )
    facts: Path | None = key(None, help="facts manifest, for recall", role="input")

    def model_post_init(self, context) -> None:
        super().model_post_init(context)
        if self.overlap >= self.length:
            raise ValueError(f"overlap {self.overlap} must be below length {self.length}")
        if (self.stream is None) == (self.mix is None):
            raise ValueError("give either mix or stream")
        if self.stream and self.order:
            raise ValueError("order is that of the rows of mix, and stream is given; remove order")
        if self.stream and self.stream.length != self.length:
            raise ValueError(f"stream.length {self.stream.length} and length {self.length} differ; make them the same")


def freeze(model: Any, trainable: str) -> int:
    """Leave only the named tensors trainable; the number of trainable parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable == "all" or ".self_attn." in name)
    # under ZeRO-3 a process holds no part of a parameter until it is used, and `ds_numel` is its whole size
    count = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    if count == 0:
        raise UserError(f"trainable = {trainable}: this model has no tensors of that kind; choose all.")
    return count


class Curve:
    """Held-out loss per source (nats per token) and recall of facts, on the same rows for every arm."""

    def __init__(self, job: Config, tokenizer: Any) -> None:
        path = job.held_out or job.mix
        sources = sorted(manifest.read(path).card["realised"]) if path else []
        self.rows = {s: rows(path, "validation", job.length, tokenizer, source=s)[: job.measure_rows] for s in sources}
        self.questions = tables.read(job.facts.parent / "items.parquet") if job.facts else []
        self.tokenizer = tokenizer

    def __call__(self, model: Any) -> dict[str, manifest.Metric]:
        """Leaves the mode of the model as it was; draws no random number."""
        training = model.training
        found = {}
        for source, part in self.rows.items():
            loss, count = held_out_loss(model, part)
            found[f"held_out/{source}"] = manifest.Metric(value=loss, n=count)
        if self.questions:
            found["fact_recall"] = manifest.metric(recall(model, self.tokenizer, self.questions))
        model.train(training)
        return found


def training_data(job: Config, tokenizer: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """(data set, callbacks that come before the one that seals checkpoints, further TrainingArguments)."""
    if job.mix:
        return rows(job.mix, "train", job.length, tokenizer, overlap=job.overlap), [], {}
    from posttrain.data import stream_training

    stream = TokenStream(job.stream, tokenizer, determinism.derive(job.seed, "stream"))
    stream.check()
    feed = stream_training.Feed(stream, job.batch_size)
    return stream_training.dataset(feed), [stream_training.make_callback(feed)], {"ignore_data_skip": True}


def main(job: Config) -> None:
    determinism.setup(job.seed)
    from transformers import Trainer, TrainingArguments

    tokenizer = models.load_tokenizer(job.start)
    curve = Curve(job, tokenizer)
    data, more, options = training_data(job, tokenizer)
    if job.order:
        options["data_seed"] = determinism.derive(job.seed, "order", job.order)
    args = TrainingArguments(**arguments(job, **options))
    model = models.load(job.start)
    model.config.use_cache = False
    before = curve(models.place(model)) if not job.deepspeed else {}
    trained = freeze(model, job.trainable)
    tracker = Tracker(job)
    callback = make_callback(job, tracker)
    # a sharded model cannot be measured on one rank
    watch = [] if job.deepspeed else [follow(lambda m: {n: v.value for n, v in curve(m).items()}, job.measure_every)]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        callbacks=[*watch, *more, callback],
    )
    train(trainer, job, tracker, callback)
    realised = more[0].realised() if more else manifest.read(job.mix).card["realised"]
    files, first = save_trained(trainer, tokenizer, job), trainer.is_world_process_zero()
    del trainer, model
    distributed.leave()
    if not first:
        return
    model = models.place(models.read(job.folder / "model"))  # what was saved is measured, whole on this process
    metrics = {**{f"before/{name}": value for name, value in before.items()}, **curve(model), "trained_parameters": trained}
    metrics["tokens"] = job.steps * job.batch_size * job.length
    tracker.finish({name: getattr(value, "value", value) for name, value in metrics.items()})
    manifest.publish(job, metrics, [*files, tracker.path], card={"mix": realised})
    discard_checkpoints(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
