"""The sacct that the executor meets: what it changes and what it lets through. Stand-ins for the real programs."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.project import ROOT

SHIM = ROOT / "workflow" / "bin"
QUERY = ("-X", "--parsable2", "--noheader", "--format=JobIdRaw,State", "--name", "run")


@pytest.fixture
def ask(tmp_path):
    def call(states: str, *words: str, queued: str = "", code: int = 0):
        for name, body in (("sacct", f"printf '{states}'; exit {code}"), ("squeue", f"echo '{queued}' | grep -w \"$3\"")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        path = os.pathsep.join([str(SHIM), str(tmp_path), os.environ["PATH"]])
        return subprocess.run(["sacct", *words], env={"PATH": path}, capture_output=True, text=True, check=False)

    return call


def test_states_that_the_executor_does_not_end(ask):
    done = ask("1|COMPLETED\n2|CANCELLED by 1000\n3|PREEMPTED\n4|PREEMPTED\n5|RUNNING\n6|NODE_FAIL\n", *QUERY, queued="4")
    assert done.stdout == "1|COMPLETED\n2|CANCELLED\n3|CANCELLED\n4|PREEMPTED\n5|RUNNING\n6|NODE_FAIL\n"


def test_other_questions_pass_through(ask):
    assert ask("2|CANCELLED by 1000\n", "-j", "2", "--format=State").stdout == "2|CANCELLED by 1000\n"


def test_no_jobs_and_failures(ask):
    assert ask("", *QUERY).stdout == "" and ask("", *QUERY).returncode == 0
    assert ask("", *QUERY, code=3).returncode == 3


def test_a_path_that_leads_back_to_itself_ends(ask, tmp_path):
    (tmp_path / "link").symlink_to(SHIM)
    path = os.pathsep.join([str(tmp_path / "link"), "/usr/bin", "/bin"])
    done = subprocess.run(["sacct", "-j", "1"], env={"PATH": path}, capture_output=True, check=False, timeout=20)
    assert done.returncode == 127
