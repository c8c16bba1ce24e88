"""SFT of one arm: any weighting (sft, dft, PEAR at three levels) on any per-token loss (nll, kl), one trainer.

The arms of a comparison differ in `weighting` and `loss` alone: same batches in the same order, same steps, same
learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.core import cli, determinism, distributed, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.errors import UserError
from posttrain.core.tracking import Tracker, read_history
from posttrain.core.training import TrainingConfig, arguments, discard_checkpoints, make_callback, save_trained, train
from posttrain.sft import losses
from posttrain.sft.traces import batches, check

if TYPE_CHECKING:
    import torch

IGNORE = -100
STATISTICS = ("weight_mean", "weight_ess", "weight_floor", "weight_cap", "delta_mean")


class Config(TrainingConfig):
    weighting: losses.Weighting = key("sft", help="per-token weight w_t")
    loss: Literal["nll", "kl"] = key("nll", help="per-token loss l_t: negative log-likelihood, or KL to the data's policy")
    gamma: float = key(0.999, help="PEAR discount per later response token", gt=0, le=1)
    block: int = key(4, help="PEAR block size B", gt=0)
    clip_delta: tuple[float, float] = key((-0.08, 0.3), help="clip of each log ratio, before summing")
    clip_log: tuple[float, float] = key((-10.0, 5.0), help="clip of log G")
    norm: losses.Norm = key("tokens", help="normaliser of the weighted loss")
    ratio_model: Literal["live", "frozen_base"] = key("live", help="policy in the ratio's numerator")
    negative_strength: float = key(0.0, help="weight of wrong traces, subtracted; 0: they are left out", ge=0)
    max_length: int = key(512, help="cut prompt + response to this many tokens", gt=1)
    start: Path = key(help="manifest of the model to start from", role="input")
    traces: Path = key(help="manifest of the stored traces", role="input")

    def model_post_init(self, context) -> None:
        super().model_post_init(context)
        for name in ("clip_delta", "clip_log"):
            low, high = getattr(self, name)
            if low >= high:
                raise ValueError(f"{name} = [{low}, {high}]: the lower bound must be below the upper one")
        if self.loss == "kl" and self.negative_strength:
            raise ValueError("negative_strength needs loss: nll; set it to 0 or change loss")


def example(row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Tensors of one trace: input_ids, labels (-100 on the prompt), logp_beta and the stored distribution, all [T]-aligned.

    A response that is cut at `max_length` ends at its last kept token: PEAR's suffix beyond the cut is unknown.
    """
    import torch

    prompt, response = row["prompt_ids"], row["response_ids"]
    total = len(prompt) + len(response)
    head, width = len(prompt), len(row["top_ids"][0])
    logp = torch.zeros(total)
    logp[head:] = torch.tensor(row["logp_beta"])
    top_ids = torch.zeros(total, width, dtype=torch.long)
    top_ids[head:] = torch.tensor(row["top_ids"])
    top_logps = torch.full((total, width), -torch.inf)
    top_logps[head:] = torch.tensor(row["top_logps"])
    full = {
        "input_ids": torch.tensor(prompt + response),
        "labels": torch.tensor([IGNORE] * head + response),
        "logp_beta": logp,
        "top_ids": top_ids,
        "top_logps": top_logps,
    }
    return {name: value[:max_length] for name, value in full.items()} | {"wrong": torch.tensor(not row["correct"])}


def collate(rows: Sequence[dict[str, Any]], pad: int) -> dict[str, torch.Tensor]:
    """Right-pad a list of examples to [B, T]; attention_mask marks real tokens (also where EOS is the pad id)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    fill = {"input_ids": pad, "labels": IGNORE, "logp_beta": 0.0, "top_ids": 0, "top_logps": -torch.inf, "logp_frozen": 0.0}
    batch = {
        n: pad_sequence([row[n] for row in rows], batch_first=True, padding_value=v) for n, v in fill.items() if n in rows[0]
    }
    ones = [torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows]
    return batch | {"attention_mask": pad_sequence(ones, batch_first=True), "wrong": torch.stack([row["wrong"] for row in rows])}


def batch_loss(model, batch: dict[str, torch.Tensor], job: Config, count) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of one micro-batch and weight statistics. `count`: response tokens (or documents, norm per_sequence) of the
    global batch."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]  # logits at t predict token t + 1: everything below is aligned to labels
    mask = labels != IGNORE
    logp = torch.zeros(mask.shape, device=logits.device)
    logp = logp.masked_scatter(mask, token_logprobs(logits[mask], labels[mask]))
    beta = batch["logp_beta"][:, 1:]
    target = batch["logp_frozen"][:, 1:] if "logp_frozen" in batch else logp.detach()
    w, statistics = losses.token_weights(
        job.weighting, target, beta, mask, gamma=job.gamma, block=job.block, clip_delta=job.clip_delta, clip_log=job.clip_log
    )
    w = losses.normalise(w, mask, job.norm)
    if job.negative_strength:  # after normalising: scaling to mean 1 would turn a negative weight into a positive one
        negative = losses.negative_weights(target, beta, mask, job.negative_strength)
        if job.norm == "per_sequence":
            negative = losses.normalise(negative, mask, job.norm)
        w = torch.where(batch["wrong"][:, None], negative, w)
    if job.loss == "nll":
        per_token = -logp
    else:
        kl = losses.kl_to_stored(logits[mask], batch["top_ids"][:, 1:][mask], batch["top_logps"][:, 1:][mask])
        per_token = torch.zeros(mask.shape, device=logits.device).masked_scatter(mask, kl)
    return losses.weighted_loss(per_token, w, mask, count), statistics


def make_arguments(job: Config):
    """TrainingArguments of this job, to be made before its model is loaded."""
    from transformers import TrainingArguments

    return TrainingArguments(**arguments(job, dataloader_drop_last=True))


def make_trainer(model, job: Config, data: list[dict[str, Any]], pad: int, callbacks: list[Any], args=None):
    """The Transformers Trainer with this loss. Its gradient does not depend on how a global batch is cut."""
    from transformers import Trainer

    class WeightedTrainer(Trainer):
        loss_is_scaled_for_ga = True  # batch_loss divides by the count over the whole accumulated global batch
        statistics: list[dict[str, float]]  # of the micro-batches since the last log line

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            count = job.batch_size if job.norm == "per_sequence" else num_items_in_batch
            loss, statistics = batch_loss(model, inputs, job, count)
            self.statistics.append(statistics)
            return loss * self.accelerator.num_processes  # the processes' gradients are averaged

        def log(self, logs, start_time=None):
            if "loss" in logs and job.weighting != "sft":
                logs = {**logs, **self.mean_statistics()}
            super().log(logs, start_time)

        def mean_statistics(self) -> dict[str, float]:
            """Mean over micro-batches and processes; the ESS so is that of a micro-batch, not of the whole batch."""
            import torch

            seen, self.statistics = [one for one in self.statistics if one], []
            sums = [sum(one.get(name, 0.0) for one in seen) for name in STATISTICS]
            total = self.accelerator.reduce(torch.tensor([*sums, len(seen)], device=self.args.device), reduction="sum").tolist()
            present = STATISTICS if job.weighting.startswith("pear_") else STATISTICS[:2]
            return {name: value / total[-1] for name, value in zip(present, total, strict=False)} if total[-1] else {}

    trainer = WeightedTrainer(
        model=model,
        args=args or make_arguments(job),
        train_dataset=data,
        data_collator=lambda rows: collate(rows, pad),
        callbacks=callbacks,
    )
    trainer.statistics = []
    if not trainer.model_accepts_loss_kwargs:
        trainer.model_accepts_loss_kwargs = True  # so that the Trainer counts the labels of the whole global batch
    return trainer


def label_logps(model, data: list[dict[str, Any]], pad: int, tokens: int = 16_384) -> list[torch.Tensor]:
    """log pi of every token of each trace given what stands before it: float32 [T] per trace on the CPU, 0 at its start.

    Traces go through in groups of at most `tokens` padded tokens.
    """
    import torch

    from posttrain.core.logprobs import token_logprobs

    found: list[torch.Tensor] = [torch.empty(0)] * len(data)
    model.eval()
    for group in batches([len(row["input_ids"]) for row in data], tokens):
        part = {
            k: v.to(model.device)
            for k, v in collate([data[i] for i in group], pad).items()
            if k in ("input_ids", "attention_mask")
        }
        with torch.inference_mode():
            logits = model(**part, use_cache=False).logits
            logp = token_logprobs(logits[:, :-1], part["input_ids"][:, 1:]).cpu().clone()
        for i, line in zip(group, logp, strict=True):
            found[i] = torch.cat([torch.zeros(1), line[: len(data[i]["input_ids"]) - 1]])
    return found


def nll_per_trace(model, data: list[dict[str, Any]], pad: int) -> list[tuple[float, int]]:
    """(sum of -log pi in nats, response tokens) of each trace, in order."""
    found = []
    for row, logp in zip(data, label_logps(model, data, pad), strict=True):
        mask = row["labels"] != IGNORE
        found.append((-logp[mask].sum().item(), int(mask.sum())))
    return found


def add_frozen(model, data: list[dict[str, Any]], pad: int) -> None:
    """Store log pi_base of every label under `logp_frozen`, in place (ratio_model: frozen_base)."""
    for row, logp in zip(data, label_logps(model, data, pad), strict=True):
        row["logp_frozen"] = logp


def drift(start: Path, end: Path) -> float:
    """Relative parameter drift ||theta_end - theta_start|| / ||theta_start|| (L2 over all tensors), from two model folders."""
    from safetensors.torch import load_file

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}

    before, after = tensors(start), tensors(end)
    moved = sum((after[name].double() - value.double()).square().sum().item() for name, value in before.items())
    return (moved / sum(value.double().square().sum().item() for value in before.values())) ** 0.5


def main(job: Config) -> None:
    determinism.setup(job.seed)
    manifest.read(job.traces)
    tokenizer = models.load_tokenizer(job.start)
    file = job.traces.parent / "traces.parquet"
    stored = tables.read(file)
    check(stored, file)
    wanted = {"train": [row for row in stored if row["split"] == "train" and (row["correct"] or job.negative_strength)]}
    wanted["validation"] = [row for row in stored if row["split"] == "validation" and row["correct"]]
    for split, rows in wanted.items():
        if not rows:
            raise UserError(f"{file} has no correct trace in split {split}; check the sizes and the teacher of its job.")
    data = {split: [example(row, job.max_length) for row in rows] for split, rows in wanted.items()}
    pad = tokenizer.pad_token_id
    if job.ratio_model == "frozen_base":
        add_frozen(models.place(models.load(job.start)), data["train"], pad)
    args = make_arguments(job)
    model = models.load(job.start)
    highest = max(max(row["input_ids"].max().item() for row in rows) for rows in data.values())
    if highest >= model.config.vocab_size:
        raise UserError(
            f"{file} holds the token id {highest} and the model of {job.start} has {model.config.vocab_size} tokens; take traces "
            "that were made with this model's tokenizer."
        )
    model.config.use_cache = False
    tracker = Tracker(job)
    callback = make_callback(job, tracker)
    trainer = make_trainer(model, job, data["train"], pad, [callback], args)
    train(trainer, job, tracker, callback)
    saved = save_trained(trainer, tokenizer, job)
    first = trainer.is_world_process_zero()
    del trainer, model
    distributed.leave()
    if not first:
        return
    model = models.place(models.read(job.folder / "model"))  # what was saved is measured, whole on this process
    rows = [{"nll": nll, "tokens": n} for nll, n in nll_per_trace(model, data["validation"], pad)]
    files = [tables.write(rows, job.folder / "validation.parquet"), *saved, tracker.path]
    history = read_history(tracker.path)
    metrics = {
        "validation/nll": manifest.Metric(value=sum(r["nll"] for r in rows) / sum(r["tokens"] for r in rows), n=len(rows)),
        "validation/nll_per_trace": manifest.metric([row["nll"] for row in rows]),
        "grad_norm/mean": sum(line["grad_norm"] for line in history) / len(history),
        "drift": drift(models.model_folder(job.start), job.folder / "model"),
    }
    for name in STATISTICS:
        values = [line[name] for line in history if name in line]
        if values:
            metrics[f"weights/{name.removeprefix('weight_')}"] = sum(values) / len(values)
    tracker.finish({name: getattr(value, "value", value) for name, value in metrics.items()})
    manifest.publish(job, metrics, files)
    discard_checkpoints(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
