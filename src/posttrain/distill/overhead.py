"""Cost of TAD's loss: step time of each divergence over plain KL, on the same batches, alternating in one process.

Times differ between runs; the ratio is taken per batch, so that a slow moment of the machine hits all sides, and the order of the
divergences is drawn anew for each batch. A step is what it is in training: teacher forward, student forward and backward, update.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from posttrain.core import cli, determinism, manifest, models, tables
from posttrain.core.config import JobConfig, key
from posttrain.distill import divergences
from posttrain.distill.examples import Source, collate, columns, following, logits_of, one_vocabulary
from posttrain.distill.formulas import Divergence
from posttrain.distill.measure import moved

ARMS = {"none": Divergence(kind="none"), "kl": Divergence(kind="kl"), "rkl": Divergence(kind="rkl"), "tad": Divergence()}


class Config(JobConfig):
    repeats: int = key(30, help="batches on which every divergence is timed", gt=1)
    warmup_batches: int = key(3, help="batches before timing starts", ge=0)
    batch_size: int = key(16, help="rows per step", gt=0)
    length: int = key(128, help="tokens per packed row", gt=1)
    shape: models.Shape = key(models.Shape(), help="size of the student")
    teacher: Path = key(help="manifest of the teacher", role="input")
    mix: Path = key(help="token mix manifest", role="input")

    def model_post_init(self, _context: Any) -> None:
        if self.shape.context < self.length:
            raise ValueError(f"shape.context {self.shape.context} is below length {self.length}; raise it")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    import torch

    tokenizer = models.load_tokenizer(job.teacher)
    size = one_vocabulary(tokenizer, tokenizer, (job.teacher, job.teacher))
    teacher = models.place(models.load(job.teacher)).eval().requires_grad_(False)
    student = models.place(models.scratch(job.shape, tokenizer))
    vocabulary = columns(size, teacher, student)
    rows = Source(job.mix, None, None).rows("train", job.length, tokenizer)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(job.seed)
    table = []
    for repeat in range(job.warmup_batches + job.repeats):
        chosen = torch.randint(len(rows), (job.batch_size,), generator=generator).tolist()
        batch = moved(collate([rows[i] for i in chosen], tokenizer.pad_token_id), student.device)
        labels, mask = following(batch["labels"])
        line: dict[str, float] = {}
        for which in torch.randperm(len(ARMS), generator=generator).tolist():
            name, divergence = list(ARMS.items())[which]
            begin = time.perf_counter()
            with torch.no_grad():
                target = logits_of(teacher, batch) if name != "none" else None
            options = {"labels": labels, "ce_weight": 1.0, "vocabulary": vocabulary}
            each, _ = divergences.loss(target, logits_of(student, batch), mask, divergence, **options)
            (each.sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if student.device.type == "cuda":
                torch.cuda.synchronize()
            line[name] = time.perf_counter() - begin
        if repeat >= job.warmup_batches:
            table.append(line | {f"log_ratio_{name}": math.log(line[name] / line["kl"]) for name in ARMS if name != "kl"})
    file = tables.write(table, job.folder / "step_times.parquet")
    names = [name for name in ARMS if name != "kl"]
    metrics = {f"log_ratio/{name}": manifest.metric([line[f"log_ratio_{name}"] for line in table]) for name in names}
    manifest.publish(job, metrics, [file], not_deterministic="wall-clock times of training steps")


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
