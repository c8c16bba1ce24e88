"""Two copies of one job: the second waits, and does nothing if the first finished."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from posttrain.core import cli, locking, manifest
from posttrain.core.config import JobConfig, key


class Config(JobConfig):
    depth: int = key(1, help="setting")


@pytest.fixture
def job(tmp_path) -> Config:
    output = tmp_path / "sft" / "train" / "arm" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    return Config(output=output)


def test_first_copy_does_not_wait_and_names_itself(job):
    with locking.exclusive(job) as waited:
        assert waited is False and str(os.getpid()) in (job.folder / locking.NAME).read_text()
    with locking.exclusive(job) as waited:  # the file that stays behind holds nobody
        assert waited is False


def test_second_copy_waits_and_leaves_a_finished_job_alone(job, capsys, monkeypatch):
    """flock is per open file, so a thread of the same process stands for the other copy."""
    waits, flock = threading.Event(), fcntl.flock

    def watched(stream, operation):
        if operation == fcntl.LOCK_EX and threading.current_thread() is second:
            waits.set()
        flock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", watched)
    other = open(job.folder / locking.NAME, "a+")  # noqa: SIM115
    flock(other, fcntl.LOCK_EX)
    ran, codes = [], []
    words = ["--output", str(job.output)]
    second = threading.Thread(target=lambda: codes.append(cli.run(Config, ran.append, words)))
    second.start()
    assert waits.wait(10) and not ran
    manifest.publish(job, {"m": 1.0})
    flock(other, fcntl.LOCK_UN)
    second.join(10)
    assert codes == [0] and not ran and "was finished by the other process" in capsys.readouterr().out
    other.close()


def test_finished_only_for_this_configuration_and_whole_artifacts(job):
    file = job.folder / "a.txt"
    assert not locking.finished(job)
    file.write_text("x")
    manifest.publish(job, {}, [file])
    assert locking.finished(job) and not locking.finished(job.model_copy(update={"depth": 2}))
    file.write_text("y")
    assert not locking.finished(job)


def test_an_old_manifest_is_not_a_result_of_the_copy_that_ran(job):
    manifest.publish(job, {})
    old = job.output.stat().st_mtime - 25 * 3600
    os.utime(job.output, (old, old))
    assert not locking.finished(job)


def test_other_ranks_wait_for_rank_0_of_their_own_run(job, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "old")
    with locking.exclusive(job):
        pass
    followed = []

    def follow():
        with locking.exclusive(job) as waited:
            followed.append(waited)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "new")
    monkeypatch.setenv("RANK", "1")
    other = threading.Thread(target=follow)
    other.start()
    other.join(0.6)
    assert other.is_alive() and not followed  # the file still names the older run
    monkeypatch.setenv("RANK", "0")
    with locking.exclusive(job):
        other.join(10)
        assert followed == [False]


def test_other_ranks_learn_that_rank_0_waited(job, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    (job.folder / locking.NAME).write_text('{"run": "r", "waited": true}')
    monkeypatch.setenv("RANK", "1")
    with locking.exclusive(job) as waited:
        assert waited is True


def test_a_rank_without_torchrun_passes_through(job, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    with locking.exclusive(job) as waited:
        assert waited is False
