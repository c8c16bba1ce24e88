"""For unit tests: one thread, no network, examples that Hypothesis draws the same way each time."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile(
    "posttrain", derandomize=True, deadline=None, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("posttrain")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to reach another machine is an error of the test."""
    import socket

    connect = socket.socket.connect

    def local_only(self, address):
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Variables of the machine that runs the tests take no part."""
    for name in [
        n
        for n in os.environ
        if n.startswith(("POSTTRAIN_W", "POSTTRAIN_STARTED", "WANDB_", "SLURM_")) or n in ("RANK", "WORLD_SIZE")
    ]:
        monkeypatch.delenv(name)
