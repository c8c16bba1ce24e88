"""The workflow on a real SLURM: the README's command, and what goes wrong on clusters."""

from __future__ import annotations

import csv
import json

import pytest

from tests.slurm.conftest import SFT

pytestmark = pytest.mark.cluster


def test_refused_by_sbatch(session):
    project = session["refused"]
    assert project.ends(300) != 0
    assert "no_such_partition" in project.output() and not project.jobs()
    assert not (project.folder / SFT).exists()


def test_status_from_squeue_without_accounting(session):
    project = session["without_accounting"]
    assert project.ends() == 0
    assert (project.folder / SFT).is_file() and len(project.jobs()) == 1


def test_slow_log_directory_delays_the_job_and_nothing_else(session):
    project = session["slow_logs"]
    assert project.ends() == 0, project.output()[-3000:]
    (job,) = project.jobs()  # late log lines are no reason to submit it again
    assert project.account(job, "State") == ["COMPLETED"]
    (slurms,) = (project.folder / "logs/slurm").rglob("*.log")
    assert "1 of 1 steps (100%) done" in slurms.read_text() and project.steps() == list(range(1, 13))
    assert {file.name for file in (project.folder / "slow").iterdir()} == {"slurm", "test"}  # they were on it indeed


def test_cancelled_job_is_submitted_again_and_resumes(session):
    project = session["cancelled"]
    assert project.ends() == 0
    first, second = project.jobs()
    assert project.account(first, "State")[0].startswith("CANCELLED") and project.account(second, "State") == ["COMPLETED"]
    assert "resuming from step" in project.job_log() and project.steps() == list(range(1, 3001))


def test_time_limit_is_met_before_slurm_ends_the_job(session):
    project = session["time_limit"]
    assert project.ends() == 0
    jobs = project.jobs()
    found = [project.account(job, "State", "Timelimit", "ExitCode") for job in jobs]
    assert len(jobs) > 1 and [limit for _, limit, _ in found] == ["00:02:00", "00:04:00", "00:06:00"][: len(jobs)]
    assert all(state == "FAILED" for state, _, _ in found[:-1]), found  # the trainer stopped by itself: not TIMEOUT
    assert found[-1][0] == "COMPLETED" and project.steps() == list(range(1, 10001))
    assert "resuming from step" in project.job_log()


def test_out_of_memory_asks_for_more(session):
    project = session["out_of_memory"]
    assert project.ends() == 0
    jobs = project.jobs()
    memory = [int(project.account(job, "ReqMem")[0].rstrip("M")) for job in jobs]
    assert len(jobs) > 1 and memory == [614, 921, 1382][: len(jobs)]
    assert project.account(jobs[0], "State")[0] != "COMPLETED" and project.account(jobs[-1], "State") == ["COMPLETED"]
    logs = "".join(file.read_text() for file in (project.folder / "logs/slurm").rglob("*.log"))
    assert "exceeded memory limit" in logs or "Exceeded job memory limit" in logs


def test_node_failure_moves_to_another_node(session):
    project = session["node_fails"]
    assert project.ends() == 0
    first, second = project.jobs()
    assert project.account(first, "State") == ["NODE_FAIL"]
    assert project.account(first, "NodeList") != project.account(second, "NodeList")
    assert "resuming from step" in project.job_log() and project.steps() == list(range(1, 3001))


def test_preempted_job_that_slurm_does_not_requeue_is_submitted_again(session):
    project = session["preempted"]
    assert project.ends() == 0
    first, second = project.jobs()
    assert project.account(first, "State") == ["PREEMPTED"] and project.account(second, "State") == ["COMPLETED"]
    assert "DUE TO PREEMPTION" in project.output()  # the reason reaches the terminal
    assert "resuming from step" in project.job_log() and project.steps() == list(range(1, 3001))


def test_killed_driver_and_a_second_copy_of_its_running_job(session):
    project = session["driver_killed"]
    assert project.ends() == 0
    first, second = project.jobs()
    assert {project.account(job, "State")[0] for job in (first, second)} == {"COMPLETED"}
    log = project.job_log()
    assert "waiting: " in log and f'"slurm_job": "{first}"' in log and "was finished by the other process" in log
    assert project.steps() == list(range(1, 8001))


def test_the_readmes_command_from_clone_to_ledger(session, project):
    """`snakemake --profile slurm all`, and the manifests are those of a laptop."""
    found = session["everything"]
    assert found.ends(1500) == 0
    with open(found.results / "claims.csv") as stream:
        assert len(list(csv.DictReader(stream))) > 10
    assert (found.results / "report" / "index.html").is_file()
    manifests = {path.relative_to(found.results) for path in found.results.rglob("manifest.json")}
    assert manifests == {path.relative_to(project.results) for path in project.results.rglob("manifest.json")}
    timed = {"sft/overhead"}
    for path in manifests:
        if "/".join(path.parts[:2]) not in timed:
            assert (found.results / path).read_bytes() == (project.results / path).read_bytes(), path
    provenance = json.loads((found.folder / SFT).with_name("provenance.json").read_text())
    assert provenance["slurm_job"] in found.jobs()
