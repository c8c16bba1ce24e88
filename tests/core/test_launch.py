"""From an allocation to an argument vector."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.core import launch

FLAGS = ["--clip-delta", "[-1,0.5]", "--text", "a 'b' $HOME \"c\"", "--x=-1"]


def test_one_process():
    for gpus in (0, 1):
        assert launch.command("posttrain.sft.train", FLAGS, gpus=gpus) == ["python", "-m", "posttrain.sft.train", *FLAGS]


def test_torchrun_on_one_node():
    found = launch.command("m.n", ["--a", "1"], gpus=4, python="/x/python")
    assert found == [
        "/x/python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "-m",
        "--",
        "m.n",
        "--a",
        "1",
    ]


def test_torchrun_does_not_take_a_jobs_flags_for_its_own():
    """Real torchrun: --start, --log-every, --role and the like abbreviate flags that it has."""
    from torch.distributed.run import parse_args

    flags = ["--start", "a", "--log", "1", "--max", "2", "--role=x", "--", "-m"]
    words = launch.command("m.n", flags, gpus=2)
    found = parse_args(words[words.index("torch.distributed.run") + 1 :])
    assert found.training_script == "m.n" and found.module and found.training_script_args == flags


def test_srun_geometry():
    found = launch.command("m.n", [], nodes=3, gpus=6, threads=8, job_id="41234")
    assert found[:5] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=8"]
    assert found[5:8] == ["--kill-on-bad-exit=1", "--wait=0", "--gpus-per-node=2"]
    assert found[8:10] == ["bash", "-c"] and len(found) == 11
    without = " ".join(launch.command("m.n", [], nodes=2, gpus=0, threads=8))
    assert "--gpus-per-node" not in without and "--nproc-per-node=1" in without


def test_rendezvous_port_is_the_jobs_own_and_valid():
    def port(job_id):
        script = launch.command("m", [], nodes=2, gpus=2, job_id=job_id)[-1]
        return int(script.partition("--master-port=")[2].split()[0])

    assert port("1") != port("2") and port("7") == port("7")
    assert all(20000 <= port(j) < 40000 for j in (None, "0", "19999", "20000", "99999999"))


def test_script_on_a_node_keeps_every_word(tmp_path):
    """The script is run by a real bash, with stand-ins for scontrol and python."""
    for name, body in (
        ("scontrol", 'if [ "$2" = hostnames ]; then echo "$3-1"; echo "$3-2"; else echo "NodeName=$4 NodeAddr=ip-of-$4 X=1"; fi'),
        ("python", 'for word in "$@"; do printf "%s\\n" "$word"; done'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    words = launch.command("m.n", FLAGS, nodes=2, gpus=8, threads=8, job_id="77")
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NODELIST": "gpu", "SLURM_NODEID": "1"}
    shown = subprocess.run(words[words.index("bash") :], env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=static", "--rdzv-id=77",
        "--node-rank=1", "--master-addr=ip-of-gpu-1", "--master-port=20077", "-m", "--", "m.n", *FLAGS,
    ]  # fmt: skip


@pytest.mark.parametrize(("nodes", "gpus"), [(0, 0), (-1, 1), (1, -1)])
def test_impossible_geometry(nodes, gpus):
    with pytest.raises(ValueError, match="nodes must be at least 1"):
        launch.command("m", [], nodes=nodes, gpus=gpus)


def test_cards_must_divide_evenly():
    with pytest.raises(ValueError, match="3 is not a multiple of 2"):
        launch.command("m", [], nodes=2, gpus=3)
    with pytest.raises(SystemExit, match="error: nodes=2, gpus=3"):
        launch.main(["--nodes", "2", "--gpus", "3", "--", "m"])


@pytest.mark.parametrize(("minutes", "limit"), [(1, 0.5), (4, 3.5), (10, 9), (60, 54), (150, 135), (1440, 1425)])
def test_time_limit_leaves_room_to_save(minutes, limit):
    assert launch.time_limit(minutes) == limit


def test_time_limit_counts_from_the_start_of_the_slurm_job():
    assert launch.time_limit(10, left=8.5) == 7.5 and launch.time_limit(1, left=0.2) == 0.01


@pytest.mark.parametrize(
    ("said", "minutes"),
    [
        ("7|1-02:03:30|2026-11-30T10:01:50", 1563.5),
        ("7|2:03:30|2026-11-30T10:01:50", 123.5),
        ("7|03:30|2026-11-30T10:01:50", 3.5),
        ("6|9:00|2026-11-30T09:00:00\n7|0:45|2026-11-30T10:01:50", 0.75),  # an array, a heterogeneous job
        ("7|UNLIMITED|2026-11-30T10:01:50", None),
    ],
)
def test_what_slurm_says_of_a_job(tmp_path, monkeypatch, said, minutes):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    words = "--noheader --array-unique --job 7 --format %A|%L|%V"
    (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ "$*" = "{words}" ] && echo "{said}"\n')
    (tmp_path / "squeue").chmod(0o755)
    left, submitted = launch.slurm_times("7")
    assert left == minutes and time.localtime(submitted)[:6] == (2026, 11, 30, 10, 1, 50)


@pytest.mark.parametrize("body", ["exit 1", "echo nothing", "echo '8|1:00|x'", "echo '7|x|y'"])
def test_slurm_may_say_nothing(tmp_path, monkeypatch, body):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch.slurm_times("7") == (None, None)
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "squeue").chmod(0o755)
    assert launch.slurm_times("7") == (None, None)


@pytest.mark.parametrize("slurm", [True, False])
def test_only_slurm_ends_jobs(monkeypatch, slurm):
    seen = {}
    for name in ("SLURM_JOB_ID", "POSTTRAIN_MAX_MINUTES", "POSTTRAIN_WARM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ) | ({"SLURM_JOB_ID": "5"} if slurm else {}))
    monkeypatch.setattr(launch, "slurm_times", lambda job: (None, 5.0))
    monkeypatch.setattr(os, "execvp", lambda name, words: seen.update(os.environ))
    launch.main(["--threads", "2", "--minutes", "20", "--", "m"])
    assert seen.get("POSTTRAIN_MAX_MINUTES") == ("18.0" if slurm else None)
    assert seen["OMP_NUM_THREADS"] == "2" and ("POSTTRAIN_SUBMITTED" in seen) is slurm


@pytest.mark.parametrize(("visible", "mine"), [("4,5", "4"), ("3", "3")])
def test_jobs_inside_one_allocation_share_its_cards(monkeypatch, tmp_path, visible, mine):
    seen = {}
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"SLURM_JOB_ID": "5", "CUDA_VISIBLE_DEVICES": visible})
    monkeypatch.setattr(launch.slots, "folder", lambda: tmp_path / "cards")
    monkeypatch.setattr(os, "execvp", lambda name, words: seen.update(os.environ))
    launch.main(["--gpus", "1", "--", "m"])
    assert seen["CUDA_VISIBLE_DEVICES"] == mine
    assert (tmp_path / "cards").exists() is (visible == "4,5")


@pytest.mark.parametrize(
    ("threads", "gpus", "share"), [(2, 0, "2"), (8, 1, "8"), (8, 4, "2"), (3, 4, "1"), (0, 0, "1"), (7, 2, "3")]
)
def test_threads_per_process_never_exceed_the_allocation(threads, gpus, share):
    found = launch.environment(threads, gpus)
    assert {found[name] for name in launch.THREAD_VARIABLES} == {share} and found["TOKENIZERS_PARALLELISM"] == "false"
    assert {"OMP_NUM_THREADS", "POSTTRAIN_THREADS"} <= set(found)


def test_parse():
    values, rest = launch.parse(["--nodes", "2", "--threads", "4", "--", "m.n", "--gpus", "x", "--", "y"])
    assert values == {"nodes": 2, "gpus": 0, "threads": 4, "minutes": 0} and rest == ["m.n", "--gpus", "x", "--", "y"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["m.n"],
        ["--"],
        ["--nodes", "--", "m"],
        ["--nodes", "two", "--", "m"],
        ["--nodes", "-1", "--", "m"],
        ["--gpu", "1", "--", "m"],
        ["--nodes", "1", "extra", "--", "m"],
    ],
)
def test_wrong_launcher_flags_are_a_sentence(words):
    with pytest.raises(SystemExit) as caught:
        launch.parse(words)
    assert "usage: python -m posttrain.core.launch" in str(caught.value)


@pytest.fixture
def job(tmp_path) -> Path:
    (tmp_path / "probe.py").write_text(
        "import os, sys, json\n"
        "print(json.dumps([sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.getcwd()]))\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    return tmp_path


def test_the_line_that_is_shown_is_what_runs(job):
    words = ["7", *FLAGS]
    command = [sys.executable, "-m", "posttrain.core.launch", "--threads", "2", "--", "probe", *words]
    first = subprocess.run(command, cwd=job, capture_output=True, text=True, check=False)
    line, _, result = first.stdout.partition("\n")
    assert first.returncode == 7 and shlex.split(line) == ["python", "-m", "probe", *words] and not first.stderr
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    again = subprocess.run(
        ["bash", "-c", line],
        cwd=job,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 7 and again.stdout == result
    assert result == f'[{json.dumps(words)}, "2", "{job}"]\n'


def test_launcher_needs_the_standard_library_alone():
    code = "import sys, posttrain.core.launch; print([m for m in ('pydantic', 'yaml', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
