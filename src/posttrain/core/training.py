"""What every training job adds to a Hugging Face Trainer: complete checkpoints, time limit, tracking, NaN stop.

Checkpoints lie in `checkpoints/<digest>/` beside the manifest, where the digest names configuration, inputs and code:
a changed job never resumes from another job's state. Each complete checkpoint carries `complete.json`, written last.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from posttrain.core import manifest
from posttrain.core.config import JobConfig, key
from posttrain.core.distributed import start_deepspeed
from posttrain.core.errors import TimeLimitReached, UserError
from posttrain.core.models import drop_tied_copies
from posttrain.core.receipts import job_digest
from posttrain.core.tracking import Tracker

MARKER = "complete.json"
TIMED = re.compile(r"profiling/.*|(\w+_)?(step_time|runtime|\w*per_second)")  # log values that differ between equal runs
Schedule = Literal[  # those that need no further arguments
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]  # fmt: skip


class TrainingConfig(JobConfig):
    """Keys that all trainers share."""

    learning_rate: float = key(5e-4, help="peak learning rate of AdamW", gt=0)
    steps: int = key(100, help="optimizer steps", gt=0)
    batch_size: int = key(64, help="sequences per optimizer step, over all processes", gt=0)
    accumulation: int = key(1, help="micro-batches per optimizer step", gt=0)
    warmup: float = key(0.05, help="share of the steps with rising learning rate", ge=0, lt=1)
    schedule: Schedule = key("constant_with_warmup", help="transformers' name of the learning-rate schedule")
    weight_decay: float = key(0.0, help="AdamW weight decay", ge=0)
    max_grad_norm: float = key(1.0, help="clip the gradient to this norm", gt=0)
    precision: str = key("float32", help="float32, or bfloat16 autocast", pattern="^(float32|bfloat16)$")
    deepspeed: str | None = key(None, help="configs/deepspeed/<name>.json without the ending; null: no DeepSpeed")
    gradient_checkpointing: bool = key(False, help="recompute activations in the backward pass")
    checkpoint_every: int = key(0, help="optimizer steps between checkpoints; 0: none", role="runtime", ge=0)
    log_every: int = key(1, help="optimizer steps between log lines", role="runtime", gt=0)
    max_minutes: float | None = key(
        None, help="save, stop and exit 75 after this long; on SLURM the job's own limit holds as well", role="runtime", gt=0
    )
    workers: int = key(0, help="data-loader processes", role="runtime", ge=0)

    def model_post_init(self, _context) -> None:
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of accumulation {self.accumulation}; change one of them"
            )


def deepspeed_path(name: str | None) -> str | None:
    if name is None:
        return None
    path = Path("configs/deepspeed") / f"{name}.json"
    if not path.is_file():
        raise UserError(f"deepspeed = {name!r}: {path} does not exist; name a file of configs/deepspeed.")
    return str(path)


def arguments(job: TrainingConfig, **more: Any) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments (or a TRL config) for this job. Batch size per device is derived here.

    Build them before the model is loaded: with ZeRO-3 it is then loaded in pieces.
    """
    import torch

    if job.deepspeed:
        deepspeed_path(job.deepspeed)
        start_deepspeed()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    per_step = world * job.accumulation
    if job.batch_size % per_step:
        raise UserError(
            f"batch_size {job.batch_size} is not a multiple of {world} processes x {job.accumulation} accumulation; "
            "change batch_size, accumulation or gpus."
        )
    common: dict[str, Any] = {
        "output_dir": str(checkpoint_folder(job)),
        "per_device_train_batch_size": job.batch_size // per_step,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": job.steps,
        "learning_rate": job.learning_rate,
        "lr_scheduler_type": job.schedule,
        "warmup_steps": math.ceil(job.warmup * job.steps),
        "weight_decay": job.weight_decay,
        "max_grad_norm": job.max_grad_norm,
        "logging_steps": job.log_every,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if job.checkpoint_every else "no",
        "save_steps": job.checkpoint_every or 500,
        "save_total_limit": 2,
        "seed": job.seed,
        "data_seed": job.seed,
        "bf16": job.precision == "bfloat16",
        "activation_checkpointing": job.gradient_checkpointing,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": job.workers,
        "deepspeed": deepspeed_path(job.deepspeed),
        "remove_unused_columns": False,
    }
    return {**common, **more}


def minutes_allowed(job: TrainingConfig) -> float | None:
    """The smaller of the job's own limit and the one that the launcher derived from the SLURM job's; None: no limit."""
    limits = [job.max_minutes, float(os.environ.get("POSTTRAIN_MAX_MINUTES", "inf"))]
    limit = min(value for value in limits if value is not None)
    return None if math.isinf(limit) else limit


def checkpoint_folder(job: JobConfig) -> Path:
    return job.folder / "checkpoints" / job_digest(job)


def seal(folder: Path) -> None:
    """Mark a checkpoint as complete: sizes and digests of its files, written last."""
    found = [f for f in sorted(folder.rglob("*")) if f.is_file() and f != folder / MARKER]  # an old marker is replaced
    files = {str(f.relative_to(folder)): [f.stat().st_size, manifest.sha256(f)] for f in found}
    manifest.write_atomically(folder / MARKER, json.dumps(files))


def damage(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if it is whole."""
    try:
        files = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        files = None
    if not files or not isinstance(files, dict):
        return "it was not finished"
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is truncated or missing"
        if manifest.sha256(file) != digest:
            return f"{name} has changed"
    return None


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step; damaged ones are named on stderr and passed over."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda p: int(p.name.rpartition("-")[2]), reverse=True):
        reason = damage(path)
        if reason is None:
            return path
        print(f"warning: {path} is not used: {reason}; an older checkpoint or the start is taken.", file=sys.stderr)
    return None


def any_rank(mine: bool) -> bool:
    """Whether it holds on any process: clocks differ, and a process that stops alone leaves the others waiting."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return mine
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(float(mine), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def follow(measure: Callable[[Any], dict[str, float]], every: int) -> Any:
    """A callback that puts `measure(model)` into the trainer's own log lines, every so many steps."""
    from transformers import TrainerCallback

    class Follow(TrainerCallback):
        waiting: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step % every == 0:
                self.waiting = measure(model)
                control.should_log = True  # at this step, however rare log lines are

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs is not None and "train_runtime" not in logs:
                logs.update(self.waiting)
                self.waiting = {}

    return Follow()


def make_callback(job: TrainingConfig, tracker: Tracker) -> Any:
    """The TrainerCallback that seals checkpoints, logs, stops on a time limit and on a loss that is not finite."""
    from transformers import TrainerCallback

    started = float(os.environ.get("POSTTRAIN_STARTED", time.time()))
    limit = minutes_allowed(job)

    class JobCallback(TrainerCallback):
        out_of_time = False

        def on_log(self, args, state, control, logs=None, **kwargs):
            values = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}
            for name in ("loss", "grad_norm"):
                if not math.isfinite(values.get(name, 0.0)):
                    raise UserError(
                        f"{name} is {values[name]} at step {state.global_step} of {job.output}; lower learning_rate "
                        f"(now {job.learning_rate}) or look at the batch before it. No result was written."
                    )
            if "train_runtime" not in values:  # the summary at the end holds times, which differ between runs
                tracker.log(state.global_step, {k: v for k, v in values.items() if not TIMED.fullmatch(k)})

        def on_step_end(self, args, state, control, **kwargs):
            if limit and state.global_step < state.max_steps and any_rank(time.time() - started > limit * 60):
                self.out_of_time = control.should_save = control.should_training_stop = True

        def on_save(self, args, state, control, **kwargs):
            any_rank(False)  # every process has written its part
            if state.is_world_process_zero:
                seal(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return JobCallback()


def train(trainer: Any, job: TrainingConfig, tracker: Tracker, callback: Any) -> None:
    """Run (or resume) `trainer`, then delete the checkpoints of this and of older configurations."""
    folder = checkpoint_folder(job)
    for other in folder.parent.glob("*") if folder.parent.is_dir() else ():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)  # every rank comes here
    resume = newest_complete(folder)
    start = int(resume.name.rpartition("-")[2]) if resume else 0
    tracker.rewind(start)
    if resume:
        print(f"resuming from step {start} ({resume})", flush=True)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if callback.out_of_time:
        tracker.stop()
        raise TimeLimitReached(
            f"stopped after {minutes_allowed(job):g} minutes at step {trainer.state.global_step} of {job.steps}."
        )


def save_trained(trainer: Any, tokenizer: Any, job: JobConfig) -> list[Path]:
    """Write `model/` beside the manifest and return its files. Every rank calls it (ZeRO-3 gathers), rank 0 writes."""
    target, partial = job.folder / "model", job.folder / ".model.partial"
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.config.use_cache = True
    if trainer.is_world_process_zero():
        shutil.rmtree(partial, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(partial))
    if not trainer.is_world_process_zero():
        return []
    drop_tied_copies(partial, model)
    (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle that names this machine's paths
    tokenizer.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return sorted(file for file in target.rglob("*") if file.is_file())


def discard_checkpoints(job: JobConfig) -> None:
    """After the manifest is published the checkpoints have done their work."""
    if int(os.environ.get("RANK", "0")) == 0:
        shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
