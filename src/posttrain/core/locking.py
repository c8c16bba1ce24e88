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
from typing import IO

from posttrain.core import receipts
from posttrain.core.config import JobConfig

NAME = ".lock"


def holder(done: bool) -> dict[str, object]:
    """What the lock file says: who works here; `run` is torchrun's id, which all ranks share; `done`: nothing is left."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "run": os.environ.get("TORCHELASTIC_RUN_ID"),
        "done": done,
    }


def write(stream: IO[str], text: str) -> None:
    """Replace the lock file's content, on the disk at once: other nodes read it."""
    stream.seek(0)
    stream.truncate()
    stream.write(text)
    stream.flush()
    os.fsync(stream.fileno())


def follow_rank0(path: Path, poll: float = 0.2) -> bool:
    """On other ranks: wait until rank 0 of the same torchrun holds the folder; returns its word on whether all is done.

    Without this they would wait in the process group instead, whose patience ends after half an hour.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    while run is not None:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("run") == run:
            return bool(found["done"])
        time.sleep(poll)
    return False


@contextlib.contextmanager
def exclusive(job: JobConfig) -> Iterator[bool]:
    """Hold the job's folder; yields whether another process has finished this very job since it was asked for.

    Rank 0 holds it, and decides, for all ranks.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        yield follow_rank0(job.folder / NAME)
        return
    since = float(os.environ.get("POSTTRAIN_SUBMITTED", time.time()))
    with open(job.folder / NAME, "a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            print(f"waiting: {job.folder} is being worked on by {stream.read().strip() or 'another process'}", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        done = receipts.redeem(job, since)
        write(stream, json.dumps(holder(done)))
        try:
            yield done
        finally:
            if not done:  # a run of the same id, as after a requeue, must not follow this one; ranks of a done job may still read
                write(stream, "")
