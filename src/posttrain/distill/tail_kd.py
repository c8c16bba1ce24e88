"""Distillation of a student from a teacher, one arm: L = ce_weight x cross-entropy + weight x divergence, per target token.

TAD (tail-aware distillation, arXiv 2602.20816 through public notes) and its peers; arms differ in the divergence alone, with the
same rows in the same order, the same initialisation and steps. Pretraining distillation: packed text of a mix or a stream, all
tokens. Supervised distillation: demonstrations of a task or stored traces, response tokens. The mean is over the valid tokens of
the global batch (inferred); a sequence is a row. The teacher runs online, frozen and whole on every process, or its stored
log-probabilities are read (`distill/teacher`). Judged on held-out rows by exact metrics.

Under DeepSpeed the teacher is loaded before the process group's configuration exists, so that ZeRO-3 does not shard it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from posttrain.core import cli, determinism, distributed, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.errors import UserError
from posttrain.core.tracking import Tracker
from posttrain.core.training import TrainingConfig, arguments, discard_checkpoints, follow, make_callback, save_trained, train
from posttrain.data.streams import StreamConfig, TokenStream
from posttrain.distill import divergences, measure, student
from posttrain.distill.examples import Source, collate, columns, following, logits_of, one_vocabulary
from posttrain.distill.formulas import Divergence
from posttrain.distill.teacher import Stored


class Config(TrainingConfig):
    divergence: Divergence = key(Divergence(), help="what pulls the student to the teacher; kind none: cross-entropy alone")
    weight: float = key(1.0, help="weight of the divergence", ge=0)
    ce_weight: float = key(1.0, help="weight of the cross-entropy on the row's own tokens", ge=0)
    student: Literal["scratch", "start", "cut"] = key("scratch", help="begin at random, at a model, or cut from the teacher")
    shape: models.Shape | None = key(None, help="scratch, cut: size of the student")
    length: int = key(256, help="tokens per packed row; longest row of demonstrations and traces", gt=1)
    teacher_dtype: str = key("float32", help="teacher's weights: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    head: int = key(10, help="K of the measured decomposition, the same for all arms", gt=0)
    held_out_rows: int = key(64, help="test rows on which the arm is judged", gt=1)
    fixed_rows: int = key(4, help="of them, rows of the curve over training", gt=0)
    measure_every: int = key(50, help="steps between points of that curve", gt=0)
    chunk: int | None = key(
        None, help="positions whose logits are widened at once; null: by the vocabulary", role="runtime", gt=0
    )
    teacher: Path = key(help="manifest of the teacher", role="input")
    statistics: Path | None = key(None, help="its stored log-probabilities of the training rows; null: online", role="input")
    start: Path | None = key(None, help="start: manifest of the model to begin with", role="input")
    stream: StreamConfig | None = key(
        None, help="text that is read while training, by hub id or path; judged on mix, task or traces"
    )
    mix: Path | None = key(None, help="token mix manifest", role="input")
    task: Path | None = key(None, help="task manifest: its demonstrations", role="input")
    traces: Path | None = key(None, help="traces manifest", role="input")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if sum(path is not None for path in (self.mix, self.task, self.traces)) != 1:
            raise ValueError("give one of mix, task and traces; with stream it is what the arm is judged on")
        if (self.student == "start") != (self.start is not None) or (self.student == "start") == (self.shape is not None):
            raise ValueError("student: start needs start and no shape; scratch and cut need a shape and no start")
        if self.stream and (self.statistics or self.stream.length != self.length):
            raise ValueError(
                "a stream has the length of the rows and no stored statistics; correct length or leave out statistics"
            )
        if not (self.ce_weight or (self.weight and self.divergence.kind != "none")):
            raise ValueError("ce_weight, weight and divergence leave no loss; raise one of them")


def make_trainer(model: Any, teacher: Any, job: Config, data: Any, pad: int, vocabulary: int | None, callbacks: list, args: Any):
    """The Transformers Trainer with this loss. `teacher` may be None where rows hold `logps` or the kind is none. A gradient does not
    depend on how a global batch is cut into micro-batches and processes (rows stay whole)."""
    import torch
    from transformers import Trainer

    class DistillTrainer(Trainer):
        loss_is_scaled_for_ga = True  # compute_loss divides by the count over the whole accumulated global batch
        sums: Any = 0.0  # of (tokens, cross-entropy, divergence, rows, beta(X)) since the last log line

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels, mask = following(inputs["labels"])
            logits, target = logits_of(model, inputs), None
            if "logps" in inputs:
                target = inputs["logps"]
            elif job.divergence.kind != "none" and job.weight:
                with torch.no_grad():
                    target = logits_of(teacher, inputs)
            each, found = divergences.loss(
                target,
                logits,
                mask,
                job.divergence if job.weight else Divergence(kind="none"),
                labels=labels,
                weight=job.weight,
                ce_weight=job.ce_weight,
                vocabulary=vocabulary,
                chunk=job.chunk,
            )
            beta = found.get("beta_x", torch.zeros(len(labels), device=logits.device))
            numbers = [found[n].sum().double() if n in found else each.new_zeros(()).double() for n in ("ce", "divergence")]
            counts = [mask.sum().double(), torch.tensor(float(len(labels)), device=logits.device).double()]
            self.sums = self.sums + torch.stack([counts[0], *numbers, counts[1], beta.double().sum()])
            return each.sum() / max(int(num_items_in_batch), 1) * self.accelerator.num_processes  # their gradients are averaged

        def log(self, logs, start_time=None):
            if "loss" in logs and torch.is_tensor(self.sums):
                tokens, ce, divergence, rows, beta = self.accelerator.reduce(self.sums, reduction="sum").tolist()
                logs = {**logs, "ce": ce / max(tokens, 1), "divergence": divergence / max(tokens, 1)}
                logs |= {"beta_x": beta / rows} if job.divergence.kind == "tad" else {}
                self.sums = 0.0
            super().log(logs, start_time)

    trainer = DistillTrainer(
        model=model, args=args, train_dataset=data, data_collator=lambda rows: collate(rows, pad), callbacks=callbacks
    )
    trainer.model_accepts_loss_kwargs = True  # so that the Trainer counts the labels of the whole global batch
    return trainer


def begin(job: Config, teacher: Any, tokenizer: Any) -> Any:
    """The student, float32, in evaluation's cache-less form."""
    if job.student == "start":
        model = models.load(job.start)
    else:
        model = models.scratch(job.shape, tokenizer) if job.student == "scratch" else student.cut(teacher, job.shape)
    model.config.use_cache = False
    return model


def training_data(job: Config, source: Source, tokenizer: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """(data set, callbacks that come before the one that seals checkpoints, further TrainingArguments)."""
    if job.stream:
        from posttrain.data import stream_training

        stream = TokenStream(job.stream, tokenizer, determinism.derive(job.seed, "stream"))
        stream.check()
        feed = stream_training.Feed(stream, job.batch_size)
        return stream_training.dataset(feed), [stream_training.make_callback(feed)], {"ignore_data_skip": True}
    rows = source.rows("train", job.length, tokenizer)
    return (Stored(job.statistics, rows, job.teacher) if job.statistics else rows), [], {"dataloader_drop_last": True}


def main(job: Config) -> None:
    determinism.setup(job.seed)
    from transformers import TrainingArguments

    tokenizer = models.load_tokenizer(job.start or job.teacher)
    size = one_vocabulary(models.load_tokenizer(job.teacher), tokenizer, (job.teacher, job.start or job.teacher))
    source, pad = Source(job.mix, job.task, job.traces), tokenizer.pad_token_id
    held_out = source.rows(source.held_out, job.length, tokenizer)[: job.held_out_rows]
    teacher = models.place(models.load(job.teacher, job.teacher_dtype)).eval().requires_grad_(False)
    data, more, options = training_data(job, source, tokenizer)
    if not job.stream and len(data) < job.batch_size:
        raise UserError(f"batch_size {job.batch_size} is more than the {len(data)} training rows; lower it or take more data.")
    args = TrainingArguments(**arguments(job, **options))
    model = begin(job, teacher, tokenizer)
    vocabulary = columns(size, teacher, model)
    if job.head >= size - 2:
        raise UserError(f"head = {job.head} leaves no tail of {size} tokens; lower it.")
    tracker = Tracker(job)
    callback = make_callback(job, tracker)
    few = held_out[: job.fixed_rows]
    watch = follow(
        lambda m: {
            f"fixed/{name}": value
            for name, value in measure.fixed_batch(teacher, m, few, pad, job.divergence, job.head, vocabulary).items()
        },
        job.measure_every,
    )
    callbacks = [*([] if job.deepspeed else [watch]), *more, callback]  # a sharded model cannot be measured on one rank
    trainer = make_trainer(model, teacher, job, data, pad, vocabulary, callbacks, args)
    train(trainer, job, tracker, callback)
    files, first = save_trained(trainer, tokenizer, job), trainer.is_world_process_zero()
    del trainer, model
    distributed.leave()
    if not first:
        return
    model = models.place(models.read(job.folder / "model")).eval()  # what was saved is measured, whole on this process
    rows, buckets, fece = measure.on_rows(teacher, model, held_out, pad, job.head, vocabulary)
    if job.divergence.kind != "none":
        shares = measure.tail_shares(teacher, model, held_out, pad, job.divergence, job.head, vocabulary)
        rows = [row | share for row, share in zip(rows, shares, strict=True)]
    arm = manifest.identity(job.output)[2]
    files += [
        tables.write([{"arm": arm, **row} for row in rows], job.folder / "rows.parquet"),
        tables.write([{"arm": arm, **bucket} for bucket in buckets], job.folder / "buckets.parquet"),
    ]
    online = job.divergence.kind != "none" and job.weight and not job.statistics
    flops = 6 * model.num_parameters() + (2 * teacher.num_parameters() if online else 0)  # per token; attention's own left out
    measured = {name: manifest.metric([row[name] for row in rows]) for name in rows[0] if name not in ("row", "tokens")}
    measured |= {"fece": fece, "parameters": model.num_parameters(), "petaflops_per_million_tokens": flops * 1e6 / 1e15}
    measured["tokens"] = job.steps * job.batch_size * job.length
    tracker.finish({name: getattr(value, "value", value) for name, value in measured.items()})
    card = {"mix": more[0].realised()} if more else {}
    manifest.publish(job, measured, [*files, tracker.path], card=card)
    discard_checkpoints(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
