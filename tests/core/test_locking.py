"""Two copies of one job: the second waits, and does nothing if the first finished."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time

import pytest

from posttrain.core import cli, locking, manifest, receipts
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
    receipts.leave(job)
    flock(other, fcntl.LOCK_UN)
    second.join(10)
    assert codes == [0] and not ran and "was finished by the other process" in capsys.readouterr().out
    other.close()


def finish(job, *files) -> float:
    """Publish and leave a receipt; returns a moment before it."""
    before = time.time() - 1
    manifest.publish(job, {"m": 1.0}, files)
    receipts.leave(job)
    return before


def test_a_copy_puts_back_the_manifest_that_snakemake_deleted(job, monkeypatch):
    """The first copy finished while this one stood in SLURM's queue."""
    before = finish(job)
    text = job.output.read_text()
    job.output.unlink()
    monkeypatch.setenv("POSTTRAIN_SUBMITTED", str(before))
    ran = []
    assert cli.run(Config, ran.append, ["--output", str(job.output)]) == 0
    assert not ran and job.output.read_text() == text


def test_a_job_that_was_asked_for_after_the_first_had_finished_runs(job, monkeypatch):
    finish(job)
    job.output.unlink()
    ran = []
    assert cli.run(Config, ran.append, ["--output", str(job.output)]) == 0 and len(ran) == 1  # asked for now
    monkeypatch.setenv("POSTTRAIN_SUBMITTED", str(time.time() + 5))
    assert cli.run(Config, ran.append, ["--output", str(job.output)]) == 0 and len(ran) == 2


def test_receipts_hold_for_this_configuration_and_whole_artifacts(job):
    file = job.folder / "a.txt"
    assert not receipts.redeem(job, 0.0)
    file.write_text("x")
    before = finish(job, file)
    assert receipts.redeem(job, before) and not receipts.redeem(job.model_copy(update={"depth": 2}), before)
    file.write_text("y")
    assert not receipts.redeem(job, before) and not job.output.exists()
    (job.folder / receipts.NAME).write_text("{")
    assert not receipts.redeem(job, before)


def test_receipts_hold_for_this_code(job, monkeypatch):
    monkeypatch.setattr(Config, "__module__", "posttrain.sft.train")
    monkeypatch.setattr(receipts, "code_digest", lambda module: "one")
    before = finish(job)
    assert receipts.redeem(job, before)
    monkeypatch.setattr(receipts, "code_digest", lambda module: "two")
    assert not receipts.redeem(job, before)


def test_another_manifest_is_not_taken(job):
    before = finish(job)
    manifest.publish(job, {"m": 2.0})
    assert not receipts.redeem(job, before)


def test_other_ranks_wait_for_rank_0_of_their_own_run(job, monkeypatch):
    (job.folder / locking.NAME).write_text('{"run": "old", "done": true}')
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


def test_other_ranks_take_rank_0s_word(job, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("RANK", "1")
    for word in (True, False):
        (job.folder / locking.NAME).write_text(json.dumps({"run": "r", "done": word}))
        with locking.exclusive(job) as done:
            assert done is word


def test_a_run_of_the_same_id_does_not_follow_an_older_one(job, monkeypatch):
    """As after SLURM put a job back into the queue: its id, which names the run of several nodes, stays the same."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "77")
    with locking.exclusive(job):
        assert json.loads((job.folder / locking.NAME).read_text())["run"] == "77"
    assert (job.folder / locking.NAME).read_text() == ""


def test_a_rank_without_torchrun_passes_through(job, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    with locking.exclusive(job) as waited:
        assert waited is False
