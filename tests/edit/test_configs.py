"""The YAML of the stage: every block is a configuration, and arms of a task differ in the editor alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain import study
from posttrain.core import config as configs
from posttrain.edit import crispedit, factors, pretrained

EDITOR = {
    "editor",
    "projection",
    "subspace",
    "gamma",
    "chunk",
    "sequential",
    "learning_rate",
    "solve_at",
    "solve_weight",
    "dtype",
    "texts",
}
EDITOR |= {"factors"}


@pytest.mark.parametrize("tier", ["tiny", "paper"])
def test_every_block_is_a_configuration(tier, tmp_path):
    path = f"configs/{tier}/edit.yaml"
    found = configs.validate(study.stage_model("edit"), configs.read_yaml(path), path)
    for method, module in (("crispedit", crispedit), ("factors", factors), ("pretrained", pretrained)):
        section = getattr(found, method)
        if section is None:
            continue
        for name, block in (section.task if method == "factors" else section.arm).items():
            values = block.model_dump(exclude_unset=True)
            inputs = {n for n, role in configs.roles(module.Config).items() if role == "input"}
            values = {n: Path(v) if n in inputs and v is not None else v for n, v in values.items()}
            configs.validate(module.Config, {"output": tmp_path / "manifest.json", **values}, f"{path}: {method}.{name}")


@pytest.mark.parametrize(("tier", "tasks"), [
        ("tiny", ("world", "codes", "countries", "safety")),
        ("paper", ("zsre", "zsre10k", "counterfact", "wikibigedit", "qwen25")),
    ])
def test_arms_of_a_task_share_everything_but_the_editor(tier, tasks):
    found = configs.read_yaml(f"configs/{tier}/edit.yaml")
    arms = {name: block for method in ("crispedit", "pretrained") for name, block in found.get(method, {}).get("arm", {}).items()}
    assert {name.split("_")[0] for name in arms} == set(tasks)
    for task in tasks:
        blocks = [{k: v for k, v in b.items() if k not in EDITOR} for n, b in arms.items() if n.startswith(f"{task}_")]
        assert len(blocks) > 1 and all(block == blocks[0] for block in blocks)
