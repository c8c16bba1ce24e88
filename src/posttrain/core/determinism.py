"""Same configuration, seed and machine: the same bits. Threads are part of that promise."""

from __future__ import annotations

import hashlib
import os
import random


def derive(seed: int, *names: object) -> int:
    """A 31-bit seed for one purpose: `derive(3, "rl", "prompts")`. Independent of Python's hash randomisation."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def threads() -> int:
    """Threads that this process may use: what its rule was given, one outside a rule."""
    return max(1, int(os.environ.get("POSTTRAIN_THREADS", "1")))


def setup(seed: int) -> None:
    """Seed Python, NumPy and torch; choose deterministic kernels; take no more threads than were given."""
    import numpy
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    # In a forked worker the OpenMP runtime has already read the environment, so the number is set explicitly.
    torch.set_num_threads(threads())
    torch.use_deterministic_algorithms(True, warn_only=True)
