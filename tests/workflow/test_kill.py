"""kill -9 of a trainer and of the driver: the rerun resumes, and ends with the same bytes as an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

TARGET = "results/test/sft/train/two_style-sft/seed0/manifest.json"


@pytest.fixture(scope="module")
def long_training(tmp_path_factory):
    """A project whose SFT job takes seconds and checkpoints often, finished once; (project, bytes of the manifest)."""
    from tests.project import Project

    found = Project(tmp_path_factory.mktemp("kill"))
    path = found.folder / "configs/test/sft.yaml"
    path.write_text(path.read_text().replace("steps: 12,", "steps: 600,").replace("checkpoint_every: 4", "checkpoint_every: 25"))
    found.run("--target", TARGET)
    return found, (found.folder / TARGET).read_bytes()


def start(project) -> subprocess.Popen:
    """Force the SFT job again in the background, without the warm server."""
    words = [sys.executable, "-m", "snakemake", "--cores", "1", "--force", TARGET]
    return subprocess.Popen(
        words, cwd=project.folder, env=project.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for_checkpoint(project, driver: subprocess.Popen) -> int:
    """Step of the first complete checkpoint."""
    folder = (project.folder / TARGET).parent
    for _ in range(1200):
        found = sorted(folder.glob("checkpoints/*/checkpoint-*/complete.json"))
        if found:
            return int(found[-1].parent.name.rpartition("-")[2])
        assert driver.poll() is None, "the job ended before its first checkpoint"
        time.sleep(0.05)
    raise AssertionError("no checkpoint appeared")


def trainers(project) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(project.folder) and process.cmdline()[1:3] == ["-m", "posttrain.sft.train"]:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def steps(project) -> list[int]:
    lines = ((project.folder / TARGET).parent / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_killed_trainer_resumes(long_training):
    project, expected = long_training
    driver = start(project)
    step = wait_for_checkpoint(project, driver)
    (trainer,) = trainers(project)
    trainer.send_signal(signal.SIGKILL)
    assert driver.wait(timeout=60) != 0
    assert not (project.folder / TARGET).exists()  # nothing half-written is taken for a result
    assert step < 600
    project.run("--target", TARGET, "--cold")
    log = (project.folder / "logs/test/sft/train/two_style-sft.seed0.log").read_text()
    assert "resuming from step" in log
    assert (project.folder / TARGET).read_bytes() == expected
    assert steps(project) == list(range(1, 601))


def test_killed_driver_resumes(long_training):
    project, expected = long_training
    driver = start(project)
    wait_for_checkpoint(project, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    os.kill(driver.pid, signal.SIGKILL)
    for process in family:
        process.kill()
    psutil.wait_procs(family)
    assert not (project.folder / TARGET).exists()
    out = project.run("--target", TARGET, "--cold")
    assert "its lock is removed" in out
    assert "resuming from step" in (project.folder / "logs/test/sft/train/two_style-sft.seed0.log").read_text()
    assert (project.folder / TARGET).read_bytes() == expected


def test_driver_killed_alone_and_started_again_does_not_corrupt(long_training):
    """The orphaned trainer goes on; the second copy waits for it and takes its result."""
    project, expected = long_training
    driver = start(project)
    wait_for_checkpoint(project, driver)
    (orphan,) = trainers(project)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    project.run("--target", TARGET, "--cold")
    assert (project.folder / TARGET).read_bytes() == expected
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_damaged_checkpoint_is_passed_over(long_training):
    project, expected = long_training
    driver = start(project)
    wait_for_checkpoint(project, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    for process in [psutil.Process(driver.pid), *family]:
        process.kill()
    psutil.wait_procs(family)
    driver.wait()
    newest = max(
        (project.folder / TARGET).parent.glob("checkpoints/*/checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2])
    )
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    project.run("--target", TARGET, "--cold")
    log = (project.folder / "logs/test/sft/train/two_style-sft.seed0.log").read_text()
    assert f"{newest.name} is not used" in log
    assert (project.folder / TARGET).read_bytes() == expected
