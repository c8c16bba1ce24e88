"""The YAML of the stage: arms of a task differ in the editor alone."""

from __future__ import annotations

import pytest

from posttrain.core import config as configs

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


@pytest.mark.parametrize(
    ("tier", "tasks"),
    [
        ("tiny", ("world", "codes", "countries", "safety")),
        ("paper", ("zsre", "zsre10k", "counterfact", "wikibigedit", "qwen25", "qwencf", "qwenwbe")),
    ],
)
def test_arms_of_a_task_share_everything_but_the_editor(tier, tasks):
    found = configs.read_yaml(f"configs/{tier}/edit.yaml")
    arms = {name: block for method in ("crispedit", "pretrained") for name, block in found.get(method, {}).get("arm", {}).items()}
    assert {name.split("_")[0] for name in arms} == set(tasks)
    for task in tasks:
        blocks = [{k: v for k, v in b.items() if k not in EDITOR} for n, b in arms.items() if n.startswith(f"{task}_")]
        assert len(blocks) > 1 and all(block == blocks[0] for block in blocks)
