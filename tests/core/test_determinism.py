"""Seeds for purposes, threads of a rule, the same draws after setup."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from posttrain.core import determinism


def test_derived_seeds_are_fixed_for_ever():
    """Golden values: a change here changes every result of every study."""
    assert determinism.derive(0, "tasks", "two_style") == 2_111_497_777
    assert determinism.derive(3, "rl", "prompts") == 1078215507


def test_derived_seeds_do_not_depend_on_hash_randomisation():
    code = "from posttrain.core.determinism import derive; print(derive(7, 'a', 1, ('x', 2)))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{determinism.derive(7, 'a', 1, ('x', 2))}\n"}


def test_derived_seeds_are_distinct_and_fit_in_31_bits():
    found = {determinism.derive(seed, name, i) for seed in range(5) for name in ("mix", "kl") for i in range(50)}
    assert len(found) == 500 and all(0 <= v < 2**31 for v in found)


@pytest.mark.parametrize(("value", "threads"), [(None, 1), ("3", 3), ("0", 1)])
def test_threads(monkeypatch, value, threads):
    monkeypatch.delenv("POSTTRAIN_THREADS", raising=False)
    if value:
        monkeypatch.setenv("POSTTRAIN_THREADS", value)
    assert determinism.threads() == threads


def test_setup_repeats_every_generator(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_THREADS", "1")
    state = random.getstate()

    def draws(seed: int) -> tuple:
        determinism.setup(seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    try:
        assert draws(5) == draws(5) and len(set(draws(5)) & set(draws(6))) == 0
        assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        random.setstate(state)
