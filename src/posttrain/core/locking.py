"""One process per job folder: a second copy of a running job waits instead of corrupting its files.

A killed driver does not take its jobs along; when it is started again, it starts them a second time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from posttrain.core.config import JobConfig

NAME = ".lock"


def holder(waited: bool) -> dict[str, object]:
    """What the lock file says: who works here; `run` is torchrun's id, which all ranks of a job share."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "run": os.environ.get("TORCHELASTIC_RUN_ID"),
        "waited": waited,
    }


def follow_rank0(path: Path, poll: float = 0.2) -> bool:
    """On other ranks: wait until rank 0 of the same torchrun holds the folder; returns whether it had to wait for it.

    Without this they would wait in the process group instead, whose patience ends after half an hour.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    while run is not None:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("run") == run:
            return bool(found["waited"])
        time.sleep(poll)
    return False


@contextlib.contextmanager
def exclusive(job: JobConfig) -> Iterator[bool]:
    """Hold the job's folder; yields whether another process had to be waited for. Rank 0 holds it for all ranks."""
    if int(os.environ.get("RANK", "0")) != 0:
        yield follow_rank0(job.folder / NAME)
        return
    with open(job.folder / NAME, "a+") as stream:
        waited = False
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            stream.seek(0)
            print(f"waiting: {job.folder} is being worked on by {stream.read().strip() or 'another process'}", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(holder(waited)))
        stream.flush()
        yield waited


def finished(job: JobConfig) -> bool:
    """Whether the manifest is there, whole, of this very configuration and these inputs, and not from an old run."""
    from posttrain.core import config as configs
    from posttrain.core import manifest
    from posttrain.core.errors import UserError

    try:
        found = manifest.read(job.output)
        fresh = time.time() - job.output.stat().st_mtime < 24 * 3600
    except (UserError, OSError):
        return False
    paths = {n: getattr(job, n) for n, role in configs.roles(type(job)).items() if role == "input"}
    return fresh and found.config == configs.settings(job) and found.inputs == manifest.input_digests(paths)
