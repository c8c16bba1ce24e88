"""Shared by the tests: a small world made by the real modules, and a project that ran its whole workflow."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.project import Project

os.environ.setdefault("POSTTRAIN_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> SimpleNamespace:
    """Manifests of a 40-step two-style study: .task, .tokenizer, .mix, .base, .traces, .root."""
    from posttrain.base import scratch
    from posttrain.core.models import Shape
    from posttrain.data import mix, tasks, tokenizer
    from posttrain.sft import traces

    root = tmp_path_factory.mktemp("world") / "results" / "test"

    def out(reference: str) -> Path:
        path = root / reference / "seed0" / "manifest.json"
        path.parent.mkdir(parents=True)
        return path

    task, tok = out("data/tasks/two_style"), out("data/tokenizer/style")
    tasks.main(tasks.Config(output=task, kind="two_style", train=512, validation=64, test=64))
    tokenizer.main(tokenizer.Config(output=tok, kind="characters", alphabet="0123456789=ab#"))
    mixed, base, stored = out("data/mix/two_style"), out("base/scratch/two_style"), out("sft/traces/two_style")
    parts = {"two_style": mix.Part(share=1.0, field="demonstration")}
    mix.main(
        mix.Config(output=mixed, tokens=20_000, held_out_tokens=1_000, parts=parts, tokenizer=tok, sources={"two_style": task})
    )
    shape = Shape(hidden=32, layers=2, heads=2, intermediate=64, context=128)
    scratch.main(
        scratch.Config(output=base, shape=shape, length=64, steps=40, batch_size=8, mix=mixed, tokenizer=tok, learning_rate=3e-3)
    )
    traces.main(traces.Config(output=stored, source="policy", train=448, validation=64, tokenizer=base, task=task))
    return SimpleNamespace(root=root, task=task, tokenizer=tok, mix=mixed, base=base, traces=stored)


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Project:
    """The finished study of the tier `test`, one seed."""
    found = Project(tmp_path_factory.mktemp("project"))
    found.output = found.run()
    return found


@pytest.fixture
def fresh(tmp_path) -> Project:
    """The project before any run."""
    return Project(tmp_path / "project")
