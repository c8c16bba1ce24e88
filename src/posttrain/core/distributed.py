"""The process group of a DeepSpeed job: NCCL on cards, gloo on the CPU."""

from __future__ import annotations

import os
import socket

from posttrain.core.errors import UserError


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_deepspeed() -> None:
    """Join torchrun's process group, or make one of a single process. Call it before TrainingArguments are built.

    Raises UserError if the package is missing. On the CPU DeepSpeed would compile a shared-memory operator for minutes,
    and wait for ever for the lock of a build that was killed; gloo does the same work.
    """
    import torch

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError:
        raise UserError(
            "deepspeed is set and the package is not installed; install envs/requirements-cuda.txt (or `make cluster-packages`"
            " for tests on the CPU), or set deepspeed: null."
        ) from None
    if torch.distributed.is_initialized():
        return
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ.update(alone)
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl")


def leave() -> None:
    """End the process group: what follows on rank 0 waits for nobody, and models are loaded whole, even after ZeRO-3."""
    import torch
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

    if is_deepspeed_zero3_enabled():
        unset_hf_deepspeed_config()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
