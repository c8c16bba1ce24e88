"""Metrics over training steps: a local JSON-lines file always, Weights & Biases if asked for.

Nothing that a job computes depends on the tracker, and no job fails because of W&B: if it raises or its server does not
answer, one line says so and the job goes on. The W&B run id follows from the job's identity and settings, the group from
the study, so a second attempt joins the same run and reruns join the same group.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core import config as configs
from posttrain.core.config import JobConfig
from posttrain.core.errors import EXIT_TEMPORARY, UserError
from posttrain.core.manifest import identity

MODES = ("disabled", "offline", "online")
PATIENCE = 30  # seconds that a job waits for the server at its start, and again at its end


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
    return id_of([tier_of(job), *identity(job.output)], configs.settings(job))


def id_of(parts: Sequence[str | int], settings: Mapping[str, Any]) -> str:
    """The run id of a job by tier, stage, method, variant, seed and its settings (the `config` of its manifest)."""
    epoch = os.environ.get("POSTTRAIN_WANDB_EPOCH", "0")  # a deleted run id cannot be used again: raise this
    return configs.digest(["/".join(map(str, parts)), settings, epoch])[:16]


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
        """Begin the run as asked; offline if the server does not answer; not at all if W&B cannot be used."""
        for wanted in dict.fromkeys((mode(), "offline")):
            kept = "the run is kept offline" if wanted == "online" else "only history.jsonl is written"
            with self._guarded(kept):
                self.run = self._open(job, wanted)
                return
            with contextlib.suppress(Exception):  # W&B's own process still holds the run id of the failed attempt
                sys.modules["wandb"].teardown()

    @contextlib.contextmanager
    def _guarded(self, kept: str) -> Iterator[None]:
        """Whatever W&B raises becomes one line on stderr, and W&B is left alone from then on."""
        try:
            yield
        except Exception as error:
            self.run = None
            reason = (str(error).strip().splitlines() or [""])[0]
            print(f"warning: W&B: {type(error).__name__}: {reason}; {kept}.", file=sys.stderr, flush=True)

    @staticmethod
    def _open(job: JobConfig, wanted: str) -> Any:
        import wandb

        stage, method, variant, seed = identity(job.output)
        tier = tier_of(job)
        run = wandb.init(
            project=os.environ.get("POSTTRAIN_WANDB_PROJECT", "posttrain"),
            entity=os.environ.get("POSTTRAIN_WANDB_ENTITY") or None,
            group=os.environ.get("POSTTRAIN_WANDB_GROUP"),
            job_type=stage,
            name=f"{stage}/{method}/{variant}/seed{seed}",
            tags=[tag for tag in (tier, stage, method) if tag],
            id=run_id(job),
            resume="allow",
            mode=wanted,
            dir=str(job.folder),
            config=configs.settings(job),
            settings=wandb.Settings(
                silent=True,
                disable_git=True,
                x_disable_stats=True,
                console="off",
                init_timeout=PATIENCE,
                finish_timeout=PATIENCE,  # what was not sent by then stays on disk for `wandb sync`
            ),
        )
        run.define_metric("train/global_step")
        run.define_metric("*", step_metric="train/global_step")
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if not self.rank0:
            return
        with open(self.path, "a") as stream:
            stream.write(json.dumps({"step": step, **{k: float(v) for k, v in values.items()}}) + "\n")
        if self.run:
            row = {"train/global_step": step, **{f"train/{k}": v for k, v in values.items()}}
            with self._guarded("later steps are in history.jsonl alone"):
                # W&B's own count starts at 0 in each offline attempt: without `step` a second one would overwrite the first.
                self.run.log(row, step=step, commit=True)

    def rewind(self, step: int) -> None:
        """Forget local lines after `step`: a resumed attempt writes them again."""
        if self.rank0 and self.path.exists():
            kept = [row for row in read_history(self.path) if row["step"] <= step]
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def finish(self, metrics: Mapping[str, float]) -> None:
        if self.run:
            with self._guarded("its summary is in the manifest alone"):
                self.run.summary.update(dict(metrics))
                self.run.finish()

    def stop(self) -> None:
        """End this attempt, not the run: the next attempt continues it."""
        if self.run:
            with self._guarded("the end of this attempt is in history.jsonl alone"):
                self.run.finish(exit_code=EXIT_TEMPORARY)


def read_history(path: Path) -> list[dict[str, float]]:
    """The rows of history.jsonl, in step order. A last line that a kill or a full disk cut short is left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows = [json.loads(line) for line in lines[:-1]]
    try:
        return rows + [json.loads(line) for line in lines[-1:]]
    except json.JSONDecodeError:
        return rows
