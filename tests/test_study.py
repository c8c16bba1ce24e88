"""From YAML to jobs: where RL starts, which models meet which tasks, what is measured, what claims may name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from posttrain.core.errors import UserError
from posttrain.study import STAGES, Study
from tests.project import TIER

LINEAGE = {
    "defaults": {"corpus": "data/corpus/prose", "task": "data/domains/prism", "path": ["a", "b", "c"]},
    "lineage": {
        "one": {"models": {"a": "base/scratch/two_style", "b": "midtrain/prism/mcs", "c": "rl/grpo/prism-mcs"}},
        "two": {"models": {"a": "base/scratch/two_style", "b": "midtrain/prism/mc", "c": "rl/grpo/prism-mc"}},
    },
}
PIN = {"package": "p", "version": "1", "sha256": "0" * 64, "licence": "MIT"}


def tier() -> dict[str, dict]:
    """The tier of the workflow tests with a mid-training study beside it: two mixes, RL from them, groups of evaluations."""
    found = {stage: yaml.safe_load(text) or {} for stage, text in TIER.items()}
    sizes = {"train": 10, "validation": 2, "test": 3}
    found["data"]["corpus"] = {"corpus": {"prose": {"sources": {"s": {"wheel": PIN, "prefix": "p/", "suffix": ".txt"}}}}}
    found["data"]["domains"] = {"task": {"prism": {"domains": {"math": sizes}}}}
    found["midtrain"] = {
        "prism": {
            "defaults": {"start": "base/scratch/two_style", "steps": 4, "batch_size": 4, "length": 32},
            "model": {"mc": {"mix": "data/mix/two_style"}, "mcs": {"mix": "data/mix/two_style"}},
        }
    }
    found["rl"]["grpo"]["task"]["prism"] = {"task": "data/domains/prism", "answer_style": "think"}
    found["rl"]["grpo"]["start"] = {"mc": {"start": "midtrain/prism/mc"}, "mcs": {"start": "midtrain/prism/mcs"}}
    reasoning = found["evaluate"]["reasoning"]
    reasoning["task"] |= {
        "prism": {"task": "data/domains/prism", "answer_style": "think", "group": "prism"},
        "loose": {"task": "data/domains/prism"},
    }
    reasoning["checkpoint"] = {
        "plain": {"model": "base/scratch/two_style"},
        "mc": {"model": "midtrain/prism/mc", "group": "prism"},
        "mcs_rl": {"model": "rl/grpo/prism-mcs", "group": "prism"},
        "far": {"model": "midtrain/prism/mcs", "group": "elsewhere"},
    }
    found["evaluate"]["retention"] = {
        "task": {"prism": {"corpus": "data/corpus/prose", "group": "prism"}},
        "checkpoint": {"mc": {"model": "midtrain/prism/mc", "group": "prism"}, "plain": {"model": "base/scratch/two_style"}},
    }
    found["evaluate"]["lineage"] = LINEAGE
    return found


def write(folder: Path, stages: dict[str, dict], name: str = "test") -> Path:
    (folder / name).mkdir(parents=True)
    for stage in STAGES:
        (folder / name / f"{stage}.yaml").write_text(yaml.safe_dump(stages.get(stage) or {}, sort_keys=False))
    return folder


@pytest.fixture
def study(tmp_path) -> Study:
    return Study({"tier": "test"}, write(tmp_path / "configs", tier()), tmp_path / "results")


def changed(tmp_path: Path, change) -> Study:
    found = tier()
    change(found)
    return Study({"tier": "test"}, write(tmp_path / "changed", found))


# --- where RL starts ------------------------------------------------------------------------------------------


def test_rl_starts_where_the_yaml_says_and_else_at_the_base_or_arm_of_its_name(study):
    def start(task: str, name: str) -> str:
        return study.references("rl", "grpo", (task, name))["start"]

    assert start("prism", "mcs") == "midtrain/prism/mcs" and start("prism", "mc") == "midtrain/prism/mc"
    assert start("two_style", "base") == "base/scratch/two_style"
    assert start("two_style", "pear_token") == "sft/train/two_style-pear_token"
    root = study.root / "midtrain/prism/mcs/seed3/manifest.json"
    assert study.inputs("rl", "grpo", ("prism", "mcs"), 3)["start"] == str(root)
    job = study.config("rl", "grpo", ("prism", "mcs"), seed=3, inputs=study.inputs("rl", "grpo", ("prism", "mcs"), 3))
    assert job.start == root and job.answer_style == "think"
    with pytest.raises(
        UserError, match=r"checkpoint 'sft_pear_tokn' of task 'two_style' is unknown; did you mean 'sft_pear_token'"
    ):
        start("two_style", "pear_tokn")


def test_a_start_in_the_task_holds_for_every_name(tmp_path):
    found = changed(tmp_path, lambda t: t["rl"]["grpo"]["task"]["prism"].update(start="midtrain/prism/mc"))
    assert found.references("rl", "grpo", ("prism", "base"))["start"] == "midtrain/prism/mc"
    assert found.references("rl", "grpo", ("prism", "mcs"))["start"] == "midtrain/prism/mcs"  # the axis that stands later wins


def test_a_start_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UserError, match=r"midtrain\.yaml: prism\.model has no entry 'mcz'; did you mean 'mc"):
        changed(tmp_path, lambda t: t["rl"]["grpo"]["start"]["mcs"].update(start="midtrain/prism/mcz"))


# --- which models meet which tasks ----------------------------------------------------------------------------


def test_a_named_model_meets_the_named_tasks_of_its_group_alone(study):
    compared = [("two_style", name) for name in study.checkpoints]
    assert study.checkpoints == ["base", "sft_sft", "sft_pear_token", "rl_base", "rl_sft", "rl_pear_token"]
    assert study.evaluations("reasoning") == [*compared, ("prism", "mc"), ("prism", "mcs_rl"), ("loose", "plain")]
    assert study.evaluations("retention") == [("prism", "mc")]
    assert study.references("evaluate", "reasoning", ("prism", "mcs_rl"))["model"] == "rl/grpo/prism-mcs"
    assert study.references("evaluate", "retention", ("prism", "mc"))["model"] == "midtrain/prism/mc"


def test_the_group_is_no_reason_to_run_again(study):
    assert "group" not in study.settings_text("evaluate", "reasoning", ("prism", "mc"))
    assert "prism" in study.runtime_flags("evaluate", "reasoning", ("prism", "mc"))


def test_a_tier_without_a_section_evaluates_nothing(tmp_path):
    found = changed(tmp_path, lambda t: t["evaluate"].pop("retention"))
    assert found.evaluations("retention") == [] and len(found.evaluations("reasoning")) == 9


def test_measurements_are_every_end_once(study):
    found = study.measurements()
    assert len(found) == len(set(found))
    assert {name for name in found if name.startswith("evaluate/lineage")} == {"evaluate/lineage/one", "evaluate/lineage/two"}
    for method in ("reasoning", "retention"):
        expected = {f"evaluate/{method}/{task}-{name}" for task, name in study.evaluations(method)}
        assert {name for name in found if name.startswith(f"evaluate/{method}/")} == expected
    methods = {"evaluate/lineage", "evaluate/reasoning", "evaluate/retention", "sft/overhead"}
    assert {"/".join(name.split("/")[:2]) for name in found} == methods
    for reference in found:  # each has inputs that are jobs of the study
        stage, method, variant = reference.split("/")
        assert study.inputs(stage, method, variant.split("-"), 0)


@pytest.mark.parametrize("name", ["tiny", "small", "paper"])
def test_shipped_tiers_measure_each_thing_once(name):
    found = Study({"tier": name}, Path(__file__).parents[1] / "configs")
    listed = found.measurements()
    assert len(listed) == len(set(listed)) and listed
    for section in found.sections["evaluate"].values():  # a group that no task has would leave its models unevaluated
        if hasattr(section, "checkpoint"):
            groups = {block.group or "" for block in section.task.values()}
            assert {block.group or "" for block in section.checkpoint.values()} <= groups


# --- claims ---------------------------------------------------------------------------------------------------


def claims(tmp_path: Path, **values) -> Path:
    path = tmp_path / "claims.yaml"
    claim = {
        "statement": "s",
        "paper_value": "p",
        "source": "s",
        "scope": "s",
        "kind": "difference",
        "task": "prism",
        "arm": "mcs_rl",
        "baseline": "mc",
    }
    path.write_text(yaml.safe_dump({"prism": {"one": {**claim, **values}}}))
    return path


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"arm": ["mcs_rl", "far"], "baseline": ["mc", "plain"]},
        {"kind": "at_most", "bound": 0.05, "metric": "ungated", "family": "math"},
        {"task": "loose", "arm": "plain", "baseline": "base"},
        {"task": "two_style", "arm": "rl_pear_token", "baseline": "rl_base"},
        {"kind": "scalar", "reference": "evaluate/lineage/one", "bound": 1.0, "task": None, "arm": None, "baseline": None},
        {"kind": "rows", "reference": "evaluate/lineage/one", "file": "cka.parquet", "arm": "any_column", "bound": 1.0},
    ],
)
def test_claims_may_name_what_some_tier_has(study, tmp_path, values):
    study.check_claims(claims(tmp_path, **values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"arm": "mcs_rll"}, r"no tier has 'mcs_rll'; did you mean 'mcs_rl'\?$"),
        ({"baseline": "mcc"}, r"no tier has 'mcc'; did you mean 'mc'\?$"),
        ({"arm": ["mc", "fra"]}, r"no tier has 'fra'; did you mean 'far'\?$"),
        ({"baseline": ["mc", "sft_pear_tokn"]}, r"no tier has 'sft_pear_tokn'; did you mean 'sft_pear_token'\?$"),
        ({"kind": "at_most", "bound": 0.05, "baseline": "bas"}, r"no tier has 'bas'; did you mean 'base'\?$"),
        ({"kind": "at_most", "bound": 0.05, "task": "prisms"}, r"no tier has the task 'prisms'; did you mean 'prism'\?$"),
        ({"task": "losse"}, r"no tier has the task 'losse'; did you mean 'loose'\?$"),
        ({"kind": "at_most"}, r"kind: at_most needs bound; add it$"),
        (
            {"kind": "scalar", "reference": "evaluate/linage/one", "bound": 1.0},
            r"reference 'evaluate/linage/one' is not <stage>/<method>/<variant> of a known method",
        ),
        (
            {"kind": "rows", "reference": "one", "file": "f", "bound": 1.0},
            r"reference 'one' is not <stage>/<method>/<variant>",
        ),
        ({"kind": "rows", "reference": "evaluate/lineage/one", "bound": 1.0}, r"kind: rows needs file; add it$"),
        (
            {"kind": "scalar", "reference": "evaluate/lineage/oen", "bound": 1.0},
            r"no tier has 'evaluate/lineage/oen'; did you mean",
        ),
        ({"kind": "scalar", "reference": "evaluate/reasoning/prism-mcz", "bound": 1.0}, r"no tier has 'mcz'; did you mean 'mc"),
        (  # a condition that no job can meet would leave the claim unjudged for ever
            {"moot_if": [{"reference": "evaluate/lineage/oen", "metric": "m", "at_most": 1.0, "because": "b"}]},
            r"no tier has 'evaluate/lineage/oen'; did you mean 'one'\?$",
        ),
        (
            {"kind": "rows", "reference": "evaluate/lineage/one", "against": "evaluate/lineage/tow", "file": "f", "bound": 1.0},
            r"no tier has 'evaluate/lineage/tow'; did you mean 'two'\?$",
        ),
        (
            {"kind": "rows", "reference": "evaluate/lineage/one", "file": "f", "bound": 1.0, "seeded": False},
            r"write seeded: true, as is evaluate/lineage\.$",
        ),
        (
            {"kind": "reversal", "score": "accuracy", "arms": ["sft", "mc"], "arm": None, "baseline": None},
            r"no tier has 'mc'",
        ),  # an arm, not a checkpoint
    ],
)
def test_claims_about_what_no_tier_has_are_one_sentence(study, tmp_path, values, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        study.check_claims(claims(tmp_path, **values))
    assert "\n" not in str(caught.value)


def test_a_claim_may_name_what_only_another_tier_has(tmp_path):
    other = {"evaluate": {"reasoning": {"task": {"far_task": {"task": "data/tasks/x"}}, "checkpoint": {"far_model": {}}}}}
    folder = write(write(tmp_path / "configs", tier()), other, "other")
    found = Study({"tier": "test"}, folder)
    found.check_claims(claims(tmp_path, task="far_task", arm="far_model"))
    with pytest.raises(UserError, match="did you mean 'far_model'"):
        found.check_claims(claims(tmp_path, task="far_task", arm="far_modell"))
