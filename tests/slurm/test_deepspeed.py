"""Two processes and two nodes on a real SLURM: ZeRO-1, 2 and 3 through the SFT and GRPO rules against one process."""

from __future__ import annotations

import json
import os

import pytest

from tests.project import Project
from tests.slurm.conftest import DEEPSPEED, REQUIRED, SFT_TASKS

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def package():
    if not (DEEPSPEED / "deepspeed").is_dir():
        (pytest.fail if REQUIRED else pytest.skip)("DeepSpeed is not installed for the CPU: run `make cluster-packages`")


def history(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def curve(folder, name: str) -> list[float]:
    return [row[name] for row in history(folder)]


@pytest.fixture(scope="module")
def one_process(prepared):
    """The same SFT job in one process, without DeepSpeed."""
    project = Project.__new__(Project)
    project.folder, project.results = prepared, prepared / "results/test"
    project.run("--target", "results/test/sft/train/two_style-sft/seed0/manifest.json")
    return project.results / "sft/train/two_style-sft/seed0"


def tensors(folder) -> set[str]:
    from safetensors.torch import load_file

    return {name for file in (folder / "model").glob("*.safetensors") for name in load_file(file)}


@pytest.fixture
def show(capsys):
    """Figures belong to the test's output, also when it passes."""

    def lines(title: str, curves: dict[str, list[float]]) -> None:
        with capsys.disabled():
            print(f"\n{title}")
            for name, values in curves.items():
                print(f"  {name:28} " + " ".join(f"{value:.6f}" for value in values))

    return lines


def test_sft_losses_equal_one_process(session, one_process, show):
    project = session["one_node"]
    assert project.ends(1500) == 0, project.output()[-3000:]
    curves = {"one process": curve(one_process, "loss")}
    norms = {"one process": curve(one_process, "grad_norm")}
    for stage in SFT_TASKS:
        folder = project.results / f"sft/train/{stage}-sft/seed0"
        curves[f"two processes, {stage}"], norms[f"two processes, {stage}"] = curve(folder, "loss"), curve(folder, "grad_norm")
    show("SFT loss per step", curves)
    for name, values in curves.items():
        assert len(values) == 12 and values == pytest.approx(curves["one process"], rel=2e-5), name
        assert norms[name] == pytest.approx(norms["one process"], rel=1e-4), name


def test_saved_models_are_whole_and_equal(session, one_process):
    import torch
    from transformers import AutoModelForCausalLM

    project = session["one_node"]
    assert project.ends(1500) == 0
    ids = torch.arange(12)[None] % 10
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(one_process / "model")(ids).logits
        for stage in SFT_TASKS:
            model = AutoModelForCausalLM.from_pretrained(project.results / f"sft/train/{stage}-sft/seed0/model")
            assert all(parameter.numel() for parameter in model.parameters())
            assert tensors(project.results / f"sft/train/{stage}-sft/seed0") == tensors(one_process)  # a tied head once
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=2e-4)


def test_midtraining_under_zero_equals_plain_data_parallelism(session, show):
    from transformers import AutoModelForCausalLM

    project = session["one_node"]
    assert project.ends(1500) == 0
    folders = {stage: project.results / f"midtrain/prism/{stage}/seed0" for stage in ("plain", "zero3")}
    curves = {stage: [row["loss"] for row in history(folder) if "loss" in row] for stage, folder in folders.items()}
    show("Mid-training loss per step, two processes", curves)
    assert len(curves["plain"]) == 6 and curves["zero3"] == pytest.approx(curves["plain"], rel=2e-5)
    assert tensors(folders["zero3"]) == tensors(folders["plain"])
    found = json.loads((folders["zero3"] / "manifest.json").read_text())["metrics"]
    assert found["held_out/two_style"]["n"] > 0  # measured on the whole model that was saved
    assert all(p.numel() for p in AutoModelForCausalLM.from_pretrained(folders["zero3"] / "model").parameters())


def test_distillation_under_zero_equals_plain_data_parallelism(session, show):
    """A student cut from its teacher, whole on every process, under ZeRO-3."""
    from transformers import AutoModelForCausalLM

    project = session["one_node"]
    assert project.ends(1500) == 0
    folders = {stage: project.results / f"distill/tail_kd/{stage}-tad/seed0" for stage in ("plain", "zero3")}
    curves = {stage: [row["loss"] for row in history(folder) if "loss" in row] for stage, folder in folders.items()}
    show("Distillation loss per step, two processes", curves)
    assert len(curves["plain"]) == 6 and curves["zero3"] == pytest.approx(curves["plain"], rel=2e-5)
    assert tensors(folders["zero3"]) == tensors(folders["plain"])
    assert all(p.numel() for p in AutoModelForCausalLM.from_pretrained(folders["zero3"] / "model").parameters())


def test_grpo_under_zero(session, show):
    """Rollouts and losses follow the processes' seeds: the ZeRO stages agree with plain data parallelism."""
    from transformers import AutoModelForCausalLM

    project = session["one_node"]
    assert project.ends(1500) == 0
    folders = {stage: project.results / f"rl/grpo/{stage}-base/seed0" for stage in ("plain", "zero2", "zero3")}
    show("GRPO reward per step", {stage: curve(folder, "reward") for stage, folder in folders.items()})
    show("GRPO gradient norm per step", {stage: curve(folder, "grad_norm") for stage, folder in folders.items()})
    plain = folders["plain"]
    assert max(curve(plain, "reward")) > 0 and max(curve(plain, "grad_norm")) > 0  # there is something to compare
    for folder in folders.values():
        assert curve(folder, "reward")[0] == curve(plain, "reward")[0]
        assert curve(folder, "grad_norm")[0] == pytest.approx(curve(plain, "grad_norm")[0], rel=1e-3)
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        assert all(parameter.numel() for parameter in model.parameters())


def test_two_nodes(session, one_process, show):
    project = session["two_nodes"]
    assert project.ends(1500) == 0, project.output()[-3000:]
    curves = {"one process": curve(one_process, "loss")}
    for stage in ("plain", "zero3"):
        curves[f"two nodes, {stage}"] = curve(project.results / f"sft/train/{stage}-sft/seed0", "loss")
    show("SFT loss per step", curves)
    for values in curves.values():
        assert values == pytest.approx(curves["one process"], rel=2e-5)
    for job in project.jobs():
        nodes, tres, cpus = project.account(job, "NNodes", "AllocTRES", "NCPUS")
        assert (nodes, cpus) == ("2", "4") and "gres/gpu=2" in tres, tres
    log = (project.folder / "logs/test/sft/train/zero3-sft.seed0.log").read_text()
    geometry = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=1 --wait=0 --gpus-per-node=1"
    assert log.startswith(geometry)


def test_allocations_of_one_node(session):
    project = session["one_node"]
    assert project.ends(1500) == 0
    for job in project.jobs():
        nodes, tres, cpus = project.account(job, "NNodes", "AllocTRES", "NCPUS")
        assert (nodes, cpus) == ("1", "2") and "gres/gpu=2" in tres, tres


def test_only_rank_0_writes(session):
    project = session["one_node"]
    assert project.ends(1500) == 0
    for stage in SFT_TASKS:
        folder = project.results / f"sft/train/{stage}-sft/seed0"
        assert [row["step"] for row in history(folder)] == list(range(1, 13))
        assert json.loads((folder / "provenance.json").read_text())["slurm_job"] in project.jobs()
    assert not os.listdir(folder / "checkpoints") if (folder / "checkpoints").exists() else True
