"""Metrics over training steps: a local JSON-lines file always, Weights & Biases if asked for.

Nothing that a job computes depends on the tracker. The W&B run id follows from the job's identity and settings, the
group from the study, so a second attempt joins the same run and reruns join the same group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.core import config as configs
from posttrain.core.config import JobConfig
from posttrain.core.errors import UserError
from posttrain.core.manifest import identity

MODES = ("disabled", "offline", "online")


def mode() -> str:
    """POSTTRAIN_WANDB_MODE, set by the workflow from configs/config.yaml; disabled if unset."""
    value = os.environ.get("POSTTRAIN_WANDB_MODE", "disabled")
    if value not in MODES:
        raise UserError(f"wandb.mode = {value!r}: choose one of {', '.join(MODES)}.")
    return value


def check_key(value: str) -> None:
    """Before anything runs: online needs a key in the environment or in ~/.netrc."""
    if value != "online" or os.environ.get("WANDB_API_KEY"):
        return
    import netrc

    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (FileNotFoundError, netrc.NetrcParseError):
        hosts = {}
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0].split(":")[0]
    if server not in hosts:
        raise UserError("wandb.mode = online needs a key: run `wandb login`, set WANDB_API_KEY, or choose offline or disabled.")


def run_id(job: JobConfig) -> str:
    """Letters, digits and dashes only; the same for every attempt at the same job."""
    epoch = os.environ.get("POSTTRAIN_WANDB_EPOCH", "0")  # a deleted run id cannot be used again: raise this
    parts = [tier_of(job), *identity(job.output)]
    return configs.digest(["/".join(map(str, parts)), configs.settings(job), epoch])[:16]


def tier_of(job: JobConfig) -> str:
    """`tiny` of results/tiny/<stage>/...; empty for an output outside such a folder."""
    return job.output.parts[-6] if len(job.output.parts) > 5 else ""


class Tracker:
    """One per training job. `log` writes a line to history.jsonl and, on rank 0, to W&B with an explicit step."""

    def __init__(self, job: JobConfig) -> None:
        self.rank0 = int(os.environ.get("RANK", "0")) == 0
        self.path = job.folder / "history.jsonl"
        self.run: Any = None
        if self.rank0 and mode() != "disabled":
            self._start(job)

    def _start(self, job: JobConfig) -> None:
        import wandb

        stage, method, variant, seed = identity(job.output)
        tier = tier_of(job)
        self.run = wandb.init(
            project=os.environ.get("POSTTRAIN_WANDB_PROJECT", "posttrain"),
            entity=os.environ.get("POSTTRAIN_WANDB_ENTITY") or None,
            group=os.environ.get("POSTTRAIN_WANDB_GROUP"),
            job_type=stage,
            name=f"{stage}/{method}/{variant}/seed{seed}",
            tags=[tag for tag in (tier, stage, method) if tag],
            id=run_id(job),
            resume="allow",
            mode=mode(),
            dir=str(job.folder),
            config=configs.settings(job),
            settings=wandb.Settings(silent=True, disable_git=True, x_disable_stats=True, console="off"),
        )
        self.run.define_metric("train/global_step")
        self.run.define_metric("*", step_metric="train/global_step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self.rank0:
            return
        with open(self.path, "a") as stream:
            stream.write(json.dumps({"step": step, **{k: float(v) for k, v in values.items()}}) + "\n")
        if self.run:
            self.run.log({"train/global_step": step, **{f"train/{k}": v for k, v in values.items()}})

    def rewind(self, step: int) -> None:
        """Forget local lines after `step`: a resumed attempt writes them again."""
        if self.rank0 and self.path.exists():
            kept = [row for row in read_history(self.path) if row["step"] <= step]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def finish(self, metrics: Mapping[str, float]) -> None:
        if self.run:
            self.run.summary.update(dict(metrics))
            self.run.finish()


def read_history(path: Path) -> list[dict[str, float]]:
    """The rows of history.jsonl, in step order. A last line that a kill or a full disk cut short is left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows = [json.loads(line) for line in lines[:-1]]
    try:
        return rows + [json.loads(line) for line in lines[-1:]]
    except json.JSONDecodeError:
        return rows
