"""Cost of PEAR's weights: step time of each level over plain SFT, on the same batches, alternating in one process.

Times differ between runs; the ratio is taken per batch, so that a slow moment of the machine hits both sides, and the
order of the weightings is drawn anew for each batch.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.training import TrainingConfig

WEIGHTINGS = ("sft", "pear_token", "pear_block", "pear_sequence")


class Config(TrainingConfig):
    repeats: int = key(60, help="batches on which every weighting is timed", gt=1)
    warmup_batches: int = key(5, help="batches before timing starts", ge=0)
    start: Path = key(help="manifest of the model", role="input")
    traces: Path = key(help="manifest of the stored traces", role="input")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    import torch

    from posttrain.sft.train import Config as TrainConfig
    from posttrain.sft.train import batch_loss, collate, example

    manifest.read(job.traces)
    tokenizer, model = models.load_tokenizer(job.start), models.place(models.load(job.start))
    rows = [example(row, 512) for row in tables.read(job.traces.parent / "traces.parquet", None, [("split", "=", "train")])]
    arms = {
        name: TrainConfig(output=job.output, seed=job.seed, start=job.start, traces=job.traces, weighting=name)
        for name in WEIGHTINGS
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    generator = torch.Generator().manual_seed(job.seed)
    table = []
    for repeat in range(job.warmup_batches + job.repeats):
        chosen = torch.randint(len(rows), (job.batch_size,), generator=generator).tolist()
        batch = {k: v.to(model.device) for k, v in collate([rows[i] for i in chosen], tokenizer.pad_token_id).items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        line: dict[str, float] = {}
        for which in torch.randperm(len(WEIGHTINGS), generator=generator).tolist():
            name = WEIGHTINGS[which]
            begin = time.perf_counter()
            loss, _ = batch_loss(model, batch, arms[name], count)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            line[name] = time.perf_counter() - begin
        if repeat >= job.warmup_batches:
            table.append(line)
    file = tables.write(table, job.folder / "step_times.parquet")
    metrics = {}
    for name in WEIGHTINGS[1:]:
        ratios = [math.log(line[name] / line["sft"]) for line in table]  # geometric mean, as in the ledger
        metrics[f"ratio/{name}"] = manifest.Metric(value=math.exp(sum(ratios) / len(ratios)), n=len(ratios))
    reason = "wall-clock times of training steps"
    manifest.publish(job, metrics, [file], not_deterministic=reason)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
