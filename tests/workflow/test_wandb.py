"""W&B absent, disabled, offline, offline with a second attempt: the same manifests. A key is never written anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

KEY = "0123456789abcdef0123456789abcdef01234567"
HIDE = """
import runpy, sys
sys.modules["wandb"] = None  # as if it were not installed: find_spec gives None, import fails
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def flags(project, folder: Path, *more: str) -> list[str]:
    out = folder / "results/test/sft/train/two_style-arm/seed0/manifest.json"
    base = "results/test/base/scratch/two_style/seed0/manifest.json"
    traces = "results/test/sft/traces/two_style/seed0/manifest.json"
    words = [
        "--start",
        base,
        "--traces",
        traces,
        "--steps",
        "6",
        "--batch-size",
        "8",
        "--weighting",
        "pear_token",
        "--output",
        str(out),
    ]
    return [*words, "--checkpoint-every", "2", *more]


def result(folder: Path) -> bytes:
    return next(folder.rglob("manifest.json")).read_bytes()


def train(project, folder: Path, *more: str, **environment: str):
    return project.call("-m", "posttrain.sft.train", *flags(project, folder, *more), WANDB_API_KEY=KEY, **environment)


@pytest.fixture(scope="module")
def disabled(project, tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("disabled")
    assert train(project, folder).returncode == 0
    assert not list(folder.rglob("wandb"))
    return result(folder)


def test_absent_equals_disabled(project, disabled, tmp_path):
    script = tmp_path / "hide.py"
    script.write_text(HIDE)
    done = project.call(str(script), "posttrain.sft.train", *flags(project, tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert result(tmp_path) == disabled


def test_offline_equals_disabled_also_with_a_second_attempt(project, disabled, tmp_path):
    environment = {"POSTTRAIN_WANDB_MODE": "offline", "POSTTRAIN_WANDB_GROUP": "g"}
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert train(project, once, **environment).returncode == 0
    assert len(list(once.rglob("offline-run-*"))) == 1
    assert result(once) == disabled
    stopped = train(project, twice, "--max-minutes", "1e-9", **environment)
    assert stopped.returncode == 75, stopped.stderr[-2000:]
    assert train(project, twice, **environment).returncode == 0
    runs = sorted(p.name for p in twice.rglob("offline-run-*"))
    assert len(runs) == 2 and len({name.rpartition("-")[2] for name in runs}) == 1  # one run id for both attempts
    assert result(twice) == disabled


def test_run_id_follows_from_identity_and_settings():
    from posttrain.core import tracking
    from posttrain.sft.train import Config

    def job(**changed):
        return Config(**({"output": "results/t/sft/train/a-b/seed0/manifest.json", "start": "s", "traces": "t"} | changed))

    one = tracking.run_id(job())
    assert one != tracking.run_id(job(output="results/other/sft/train/a-b/seed0/manifest.json"))  # another tier
    assert one == tracking.run_id(job(log_every=7, start="elsewhere")) and one.isalnum()
    assert one != tracking.run_id(job(gamma=0.5)) != tracking.run_id(job(output="results/t/sft/train/a-c/seed0/manifest.json"))


def test_only_rank_zero_logs(tmp_path, monkeypatch):
    from posttrain.core import tracking
    from posttrain.sft.train import Config

    out = tmp_path / "sft/train/a/seed0/manifest.json"
    out.parent.mkdir(parents=True)
    job = Config(output=out, start="s", traces="t")
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "offline")
    monkeypatch.setenv("RANK", "1")
    tracker = tracking.Tracker(job)
    tracker.log(1, {"loss": 1.0})
    assert tracker.run is None and not tracker.path.exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "disabled")
    tracker = tracking.Tracker(job)
    tracker.log(1, {"loss": 1.0})
    tracker.log(2, {"loss": 0.5})
    tracker.rewind(1)
    assert [json.loads(line)["step"] for line in tracker.path.read_text().splitlines()] == [1]


def test_a_key_never_appears_in_anything_that_is_written(tmp_path):
    """The workflow runs with a fake key in the environment, in offline mode; then every file is searched for it."""
    from tests.project import Project

    project = Project(tmp_path / "project")
    target = "results/test/sft/train/two_style-sft/seed0/manifest.json"
    done = project.call(
        "-m",
        "posttrain.run",
        "--target",
        target,
        "--config",
        "tier=test",
        "wandb={mode: offline}",
        WANDB_API_KEY=KEY,
        HF_TOKEN=f"hf_{KEY}",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list((project.folder / target).parent.rglob("offline-run-*"))
    report = project.snakemake(target, "--config", "wandb={mode: offline}", "--report", "report.zip", WANDB_API_KEY=KEY)
    assert report.returncode == 0, report.stderr[-2000:]
    import zipfile

    zipfile.ZipFile(project.folder / "report.zip").extractall(project.folder / "unpacked")
    searched = 0
    for part in (".snakemake", "results", "logs", "unpacked"):
        for file in (project.folder / part).rglob("*"):
            if file.is_file():
                searched += 1
                assert KEY.encode() not in file.read_bytes(), file
    assert searched > 30
    assert KEY not in done.stdout + done.stderr
