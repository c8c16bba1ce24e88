"""Cards for local jobs: one job per card, with real processes and real locks."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from posttrain.core import slots

JOB = """
import sys, time
from posttrain.core import slots
print(",".join(slots.take(int(sys.argv[1]), poll=0.02)), flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def cards(monkeypatch, tmp_path):
    """Four cards, locks in a folder of the test's own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def start(count: int, seconds: float) -> subprocess.Popen:
        words = [sys.executable, "-c", JOB, str(count), str(seconds)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    return start


def test_jobs_at_once_get_different_cards(cards):
    jobs = [cards(count, 1.5) for count in (2, 1, 1)]
    taken = [job.stdout.readline().strip().split(",") for job in jobs]
    assert sorted(card for cards_of in taken for card in cards_of) == ["2", "3", "5", "7"]
    for job in jobs:
        job.kill()
        job.wait()


def test_a_job_waits_until_cards_are_free_and_a_killed_one_frees_its_own(cards):
    first = cards(3, 60)
    assert len(first.stdout.readline().split(",")) == 3
    second = cards(2, 0)
    assert second.stdout.readline().startswith("waiting for 2 of the GPUs 2, 3, 5, 7")
    assert second.poll() is None
    first.kill()
    first.wait()
    assert len(second.stdout.readline().split(",")) == 2
    assert second.wait(timeout=10) == 0


def test_two_jobs_that_want_most_cards_do_not_block_each_other(cards):
    started = time.time()
    jobs = [cards(3, 0.1) for _ in range(4)]
    for job in jobs:
        assert job.wait(timeout=30) == 0
    assert time.time() - started < 30


def test_the_lock_outlives_exec(cards, tmp_path):
    script = "import os; from posttrain.core import slots; slots.take(4); os.execvp('sleep', ['sleep', '30'])"
    job = subprocess.Popen([sys.executable, "-c", script])
    for _ in range(200):
        held = list(tmp_path.rglob("*.lock"))
        if len(held) == 4 and all(file.read_text() for file in held):
            break
        time.sleep(0.05)
    other = cards(1, 0)
    assert other.stdout.readline().startswith("waiting for 1")
    job.kill()
    job.wait()
    assert other.wait(timeout=10) == 0


def test_what_is_visible(monkeypatch, tmp_path):
    for value, found in (("0,1", ["0", "1"]), ("", []), ("-1", []), ("GPU-ab12, 3", ["GPU-ab12", "3"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert slots.visible() == found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(slots, "DEVICES", tmp_path)
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert slots.visible() == ["2", "10"]


def test_no_cards_means_the_cpu_and_too_few_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert slots.take(2) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert slots.take(0) == []
    with pytest.raises(SystemExit, match=r"asks for 4 GPUs and this machine shows 2 \(0, 1\)"):
        slots.take(4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
