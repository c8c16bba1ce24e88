"""What the paper tier asks a real SLURM for: jobs are submitted on hold, looked at, and cancelled."""

from __future__ import annotations

import os
import re

import pytest

from posttrain.study import Study
from tests.slurm.conftest import Cluster, slurm

pytestmark = pytest.mark.cluster


def megabytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([MGT])", text).groups()
    return round(float(number) * {"M": 1, "G": 1024, "T": 1024**2}[unit])


def minutes(text: str) -> int:
    days, _, clock = text.rpartition("-")
    hours, mins, _ = map(int, clock.split(":"))
    return int(days or 0) * 1440 + hours * 60 + mins


@pytest.fixture(scope="module")
def submitted(cluster, tmp_path_factory):
    """(project, {SLURM's name of a rule: fields}) of one job of each GPU rule; GRPO on two nodes."""
    project = Cluster(tmp_path_factory.mktemp("paper") / "project", "big")
    path = project.folder / "configs/paper/rl.yaml"
    path.write_text(re.sub(r"resources: \{", "resources: {nodes: 2, ", path.read_text()))
    here = os.getcwd()
    os.chdir(project.folder)
    try:
        study = Study({"tier": "paper", "seeds": [0]})
        task = study.names("sft", "train", "task")[0]
        arm = study.names("sft", "train", "arm")[-1]
        targets = {
            "sft_traces": f"sft/traces/{study.names('sft', 'traces', 'task')[-1]}",  # not the one that sft_train below reads
            "sft_train": f"sft/train/{task}-{arm}",
            "rl_grpo": f"rl/grpo/{task}-base",
            "evaluate_reasoning": f"evaluate/reasoning/{task}-base",
        }
        inputs = [study.path(study.checkpoint(task, "base"), 0)]
        for reference in targets.values():
            stage, method, variant = reference.split("/")
            for value in study.inputs(stage, method, variant.split("-"), 0).values():
                inputs += value if isinstance(value, list) else [value]
        wanted = [study.path(reference, 0) for reference in targets.values()]
        needs = {rule: study.resources(*rule.split("_")) for rule in targets}
    finally:
        os.chdir(here)
    for name in set(inputs) - set(wanted):
        (project.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (project.folder / name).write_text("{}")
    shim = project.folder / "hold"
    shim.mkdir()
    (shim / "sbatch").write_text('#!/bin/sh\nPATH=${PATH#*hold:}\nexec sbatch --hold "$@"\n')
    (shim / "sbatch").chmod(0o755)
    path = f"{shim}{os.pathsep}{project.environment['PATH']}"
    project.start(*wanted, "--config", "tier=paper", "--allowed-rules", *targets, PATH=path)
    found = {}
    try:
        project.awaits(lambda: len(project.jobs()) == len(targets), 120, "four submissions")
        for job in project.jobs():
            rule = re.search(rf"submitted with SLURM jobid {job} \(log: \S*/rule_(\w+?)/", project.output())[1]
            shown = dict(re.findall(r"(\S+?)=(\S+)", slurm("scontrol", "show", "job", job)))
            found[rule] = shown
    finally:
        project.driver.kill()
        for job in project.jobs():
            slurm("scancel", job)
    return found, needs


@pytest.mark.parametrize("rule", ["sft_traces", "sft_train", "rl_grpo", "evaluate_reasoning"])
def test_slurm_is_asked_for_what_the_tier_says(submitted, rule, capsys):
    found, need = submitted[0][rule], submitted[1][rule]
    tres = dict(part.split("=") for part in found["TRES"].split(","))
    with capsys.disabled():
        print(f"\n{rule}: nodes {found['NumNodes']}, {found['TRES']}, time {found['TimeLimit']}, partition {found['Partition']}")
    assert found["JobState"] == "PENDING" and found["Partition"] == "big" and found["Account"] == "test"
    assert int(tres["gres/gpu"]) == need.nodes * need.gpus
    assert int(found["NumNodes"].split("-")[0]) == need.nodes
    assert int(found["CPUs/Task"]) == need.threads and int(tres["cpu"]) == need.nodes * need.threads
    assert megabytes(found["MinMemoryNode"]) == int(need.mem_gb * 1024)
    assert minutes(found["TimeLimit"]) == int(need.hours * 60)
    assert found["Requeue"] == "0"
    if need.nodes > 1:
        assert found["NumTasks"] == str(need.nodes) and found["TresPerNode"].endswith(f"gpu:{need.gpus}")


def test_there_are_jobs_on_one_card_several_and_several_nodes(submitted):
    needs = submitted[1].values()
    assert (
        {need.nodes for need in needs} == {1, 2}
        and any(need.gpus == 1 for need in needs)
        and any(need.gpus > 1 for need in needs)
    )
