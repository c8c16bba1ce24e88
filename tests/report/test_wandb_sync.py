"""What W&B is told of a study: from manifests alone, without network; the client is W&B's own classes up to sending."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.core import manifest
from posttrain.core.errors import UserError
from posttrain.report import wandb_sync
from posttrain.report.wandb_sync import Spec, build, lineage, send, specify


def job(root: Path, address: str, inputs: dict[str, Path] | None = None, files: dict[str, bytes] | None = None) -> Path:
    """A manifest as :func:`manifest.publish` writes it."""
    stage, method, variant, seed = address.split("/")
    folder = root / address
    folder.mkdir(parents=True)
    artifacts = {}
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
        artifacts[name] = {"sha256": manifest.sha256(folder / name), "size": len(content)}
    found = manifest.Manifest(
        stage=stage, method=method, variant=variant, seed=int(seed[4:]), config={"seed": 0}, config_digest="c",
        inputs={name: manifest.sha256(path) for name, path in (inputs or {}).items()}, artifacts=artifacts,
        metrics={"loss": {"value": 1.5}}, device="cpu", packages={},
    )  # fmt: skip
    path = folder / manifest.NAME
    path.write_text(json.dumps(found.model_dump(mode="json"), sort_keys=True))
    return path


@pytest.fixture
def study(tmp_path):
    root = tmp_path / "results" / "tiny"
    text = job(root, "data/corpus/text/seed0", files={"train.parquet": b"rows"})
    base = job(root, "base/scratch/small/seed0", {"mix": text}, {"model/model.safetensors".replace("/", "_"): b"weights"})
    score = job(root, "evaluate/reasoning/sums-base/seed0", {"model": base, "task": text}, {"items.parquet": b"items"})
    job(root, "data/corpus/unused/seed0")
    return root, text, base, score


class Recorder:
    def __init__(self, fail_at: str | None = None) -> None:
        self.sent, self.synced, self.fail_at = [], [], fail_at

    def sync(self, segments) -> None:
        self.synced += list(segments)

    def send(self, spec: Spec) -> None:
        if spec.name == self.fail_at:
            raise ConnectionError("no route")
        self.sent.append(spec.name)


def test_every_input_comes_before_what_uses_it_and_nothing_else_is_sent(study):
    root, text, base, score = study
    specs = specify(root, [score])
    assert [s.name for s in specs] == [
        "tiny-data-corpus-text-seed0",
        "tiny-base-scratch-small-seed0",
        "tiny-evaluate-reasoning-sums-base-seed0",
    ]
    assert [s.type for s in specs] == ["dataset", "model", "eval-table"]
    of_text, of_base = (f"{s.name}:{manifest.sha256(p)[:12]}" for s, p in zip(specs, (text, base), strict=False))
    assert [set(s.uses) for s in specs] == [set(), {of_text}, {of_text, of_base}]
    assert all(s.aliases == ("latest", manifest.sha256(s.manifest)[:12]) for s in specs)
    assert specs[1].metadata == json.loads(base.read_text())


def test_an_input_that_was_rebuilt_is_named(study):
    root, text, base, _ = study
    text.write_text(text.read_text() + "\n")
    with pytest.raises(UserError, match=r"base/scratch/small.*'mix' was rebuilt or deleted.*snakemake"):
        lineage(root, [base])


def test_weights_are_references_and_only_the_manifest_is_a_file(study):
    pytest.importorskip("wandb")
    _, _, base, score = study
    entries = build(specify(study[0], [score])[1]).manifest.entries
    weights = entries["model_model.safetensors"]
    assert weights.ref == (base.parent / "model_model.safetensors").resolve().as_uri() and weights.local_path is None
    assert weights.size == len(b"weights")
    assert {name for name, entry in entries.items() if entry.ref is None} == {"manifest.json"}


def test_a_changed_manifest_is_another_artifact_version(study):
    pytest.importorskip("wandb")
    root, _, _, score = study
    before = build(specify(root, [score])[-1]).digest
    assert build(specify(root, [score])[-1]).digest == before
    score.write_text(score.read_text().replace("1.5", "1.6"))
    assert build(specify(root, [score])[-1]).digest != before


def test_a_second_call_goes_on_where_the_first_stopped(study, tmp_path):
    root, _, _, score = study
    receipt, specs = tmp_path / "sent.json", specify(root, [score])
    broken = Recorder(fail_at=specs[1].name)
    with pytest.raises(ConnectionError):
        send(specs, broken, receipt)
    again = Recorder()
    assert send(specs, again, receipt) == 2
    assert broken.sent + again.sent == [s.name for s in specs]
    assert send(specs, Recorder(), receipt) == 0
    score.write_text(score.read_text().replace("1.5", "1.6"))
    changed = Recorder()
    assert send(specify(root, [score]), changed, receipt) == 1 and changed.sent == [specs[-1].name]


def test_offline_attempts_go_first_and_in_order(study, tmp_path):
    root, _, base, score = study
    for name in ("offline-run-20260102_000000-a", "offline-run-20260101_000000-a", "run-20260101_000000-a"):
        (base.parent / "wandb" / name).mkdir(parents=True)
    client = Recorder()
    send(specify(root, [score]), client, tmp_path / "sent.json")
    assert [path.name for path in client.synced] == ["offline-run-20260101_000000-a", "offline-run-20260102_000000-a"]


def test_a_long_name_is_cut_and_stays_unique(study):
    found = manifest.read(study[1], verify=False)
    long = [found.model_copy(update={"variant": "x" * 150 + end}) for end in "ab"]
    names = [wandb_sync.artifact_name("tiny", one) for one in long]
    assert len(set(names)) == 2 and all(len(name) <= 128 for name in names)


def test_it_says_what_is_missing(study, monkeypatch, tmp_path):
    root, _, _, score = study
    job = wandb_sync.Config(root=root, targets=(score,), output=tmp_path / "out.tsv")
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "disabled")
    with pytest.raises(UserError, match=r"wandb.mode = disabled"):
        wandb_sync.main(job)
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    with pytest.raises(UserError, match="needs a key"):
        wandb_sync.main(job)
    assert not job.output.exists()
    wandb_sync.main(job.model_copy(update={"dry_run": True}))
    assert job.output.read_text().count("\n") == 4
