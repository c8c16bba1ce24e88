"""Cards for local jobs: one trainer per card, whatever number of jobs Snakemake starts at once.

Snakemake counts GPUs but does not say which; without this every local job lands on card 0. A SLURM job sees exactly its
cards, and nothing is done here. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from pathlib import Path

DEVICES = Path("/dev")


def visible() -> list[str]:
    """The cards that this process may use: CUDA_VISIBLE_DEVICES if it is set, otherwise those that the machine shows."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [card.strip() for card in named.split(",") if card.strip() not in ("", "-1")]
    found = [name.name.removeprefix("nvidia") for name in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", name.name)]
    return sorted(found, key=int)


def folder() -> Path:
    """Where the locks lie: one folder per user, on this machine's own disk; in a SLURM allocation, whose cards may be
    numbered from 0 again, one of its own."""
    inside = os.environ.get("SLURM_JOB_ID")
    return Path(tempfile.gettempdir()) / f"posttrain-cards-{os.getuid()}{f'-{inside}' if inside else ''}"


def lock(card: str) -> int | None:
    """Lock one card; an open descriptor that programs started by exec keep, or None if another job holds it."""
    folder().mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', card)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"pid": os.getpid()}).encode())
    os.set_inheritable(descriptor, True)  # the launcher becomes the trainer; its end frees the card
    return descriptor


def take(count: int, *, poll: float = 0.5) -> list[str]:
    """Lock `count` free cards and return their names, all or none; waits until they are free.

    Returns [] on a machine without cards (the job then runs on the CPU). Raises SystemExit with one sentence if the
    machine shows fewer cards than asked for.
    """
    cards = visible()
    if count == 0 or not cards:
        return []
    if len(cards) < count:
        raise SystemExit(
            f"error: the job asks for {count} GPUs and this machine shows {len(cards)} ({', '.join(cards)}); "
            "lower `gpus` in the tier's configuration or pass --resources gpu=N."
        )
    told = False
    while True:
        held: dict[str, int] = {}
        for card in cards:
            descriptor = lock(card)
            if descriptor is not None:
                held[card] = descriptor
            if len(held) == count:
                return list(held)
        for descriptor in held.values():  # holding a part while waiting for the rest could block two jobs for ever
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if not told:
            print(f"waiting for {count} of the GPUs {', '.join(cards)}: other jobs of this user hold them", flush=True)
            told = True
        time.sleep(poll)
