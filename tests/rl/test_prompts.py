"""What RL draws and how it is rewarded: shares of families, the filter by pass counts, the format gate, the reward log."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.core import config, manifest, models, tables
from posttrain.core.config import JobConfig
from posttrain.core.errors import TimeLimitReached, UserError
from posttrain.data import verify
from posttrain.rl import grpo
from posttrain.rl.rewards import RewardLog, exact_answer


def job(prism, folder: Path, **options) -> grpo.Config:
    output = folder / "rl" / "grpo" / "prism_mc-mid" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    defaults = {
        "steps": 3,
        "batch_size": 16,
        "generations": 4,
        "max_new_tokens": 8,
        "start": prism.mid,
        "task": prism.task,
        "learning_rate": 1e-3,
        "warmup": 0.0,
        "kl_prompts": 4,
        "answer_style": "think",
    }
    return grpo.Config(output=output, **(defaults | options))


def training(prism) -> list[dict]:
    return tables.read(prism.task.parent / "items.parquet", None, [("split", "=", "train")])


@pytest.fixture
def passes(prism, tmp_path):
    """Pass counts of the first 40 training prompts: prompt i has i % 5 right samples of 4."""

    def write(correct=lambda i: i % 5) -> Path:
        output = tmp_path / "rl/passes/prism-mid/seed0/manifest.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"id": item["id"], "family": item["family"], "n": 4, "correct": correct(i)}
            for i, item in enumerate(training(prism)[:40])
        ]
        manifest.publish(JobConfig(output=output), {}, [tables.write(rows, output.parent / "passes.parquet")])
        return output

    return write


# --- which prompts --------------------------------------------------------------------------------------------


def test_families_have_equal_shares_with_repetition(prism, tmp_path):
    """15 items of math and 50 of code: the mix is half and half, and no item comes twice before all came."""
    items = grpo.training_items(job(prism, tmp_path, families=["math", "code"], prompts=80))
    assert Counter(item["family"] for item in items) == {"math": 40, "code": 40}
    counts = Counter(item["id"] for item in items)
    assert {n for i, n in counts.items() if i.startswith("math")} == {2, 3} and len(counts) == 15 + 40
    assert {n for i, n in counts.items() if i.startswith("code")} == {1}
    assert {i.split("-")[1] for i in counts} == {"train"}
    every = grpo.training_items(job(prism, tmp_path, prompts=1000))
    assert [item["id"] for item in every] == [item["id"] for item in training(prism)]


@pytest.mark.parametrize("bounds", [(1, 1), (1, 3), (0, 0), (4, 9)])
def test_prompts_are_kept_by_their_number_of_right_samples(prism, tmp_path, passes, bounds):
    items = grpo.training_items(job(prism, tmp_path, passes=passes(), pass_counts=bounds))
    expected = [item["id"] for i, item in enumerate(training(prism)[:40]) if bounds[0] <= i % 5 <= bounds[1]]
    assert [item["id"] for item in items] == expected  # a prompt that was never sampled is not kept


def test_the_filter_comes_before_the_shares(prism, tmp_path, passes):
    options = {"passes": passes(lambda i: 1 if i in (3, 20, 21) else 0), "pass_counts": (1, 4), "families": ["math", "code"]}
    items = grpo.training_items(job(prism, tmp_path, prompts=8, **options))
    ids = [item["id"] for item in training(prism)]
    assert Counter(item["id"] for item in items) == {ids[3]: 4, ids[20]: 2, ids[21]: 2}
    with pytest.raises(UserError, match=r"^families: no item of the family 'science' is left; .*or filter less"):
        grpo.training_items(job(prism, tmp_path, **{**options, "families": ["math", "science"]}))


def test_a_filter_that_keeps_nothing_is_one_sentence(prism, tmp_path, passes):
    with pytest.raises(
        UserError, match=r"^pass_counts = \[7, 9\]: no prompt of .*manifest\.json has so many right samples; widen it\.$"
    ):
        grpo.main(job(prism, tmp_path, passes=passes(), pass_counts=(7, 9)))


def test_fewer_prompts_than_families_are_one_sentence(prism, tmp_path):
    with pytest.raises(UserError, match=r"^families: 1 items have no share for each of 2 families"):
        grpo.training_items(job(prism, tmp_path, families=["math", "code"], prompts=1))


def test_pass_counts_that_are_damaged_are_named(prism, tmp_path, passes):
    path = passes()
    (path.parent / "passes.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match=r"passes\.parquet differs from what"):
        grpo.training_items(job(prism, tmp_path, passes=path, pass_counts=(1, 1)))


def test_passes_and_pass_counts_belong_together(prism, tmp_path, passes):
    for more in ({"passes": passes()}, {"pass_counts": [1, 1]}):
        values = job(prism, tmp_path).model_dump() | more
        with pytest.raises(UserError, match=r"^rl\.yaml: passes and pass_counts belong together; give both or neither$"):
            config.validate(grpo.Config, values, "rl.yaml")


def test_the_kl_is_estimated_on_prompts_of_every_family(prism, tmp_path, monkeypatch):
    asked = []

    def watched(model, start, tokenizer, prompts, one):
        asked.extend(tokenizer.decode(prompt) for prompt in prompts)
        return manifest.Metric(value=0.0)

    monkeypatch.setattr(grpo, "kl_to_start", watched)
    grpo.main(job(prism, tmp_path, families=["math", "code"], prompts=40, steps=1, kl_prompts=6))
    assert sorted(text[0] for text in asked) == ["c"] * 3 + ["m"] * 3


# --- the gate -------------------------------------------------------------------------------------------------


def test_a_right_answer_outside_the_form_earns_nothing():
    texts = ["<think>12</think>3", "3", "12</think>3", "<think>12</think>4", " <think>1</think> 3 ", "x<think>1</think>3"]
    prompts, answers = ["p"] * len(texts), ["3"] * len(texts)
    assert exact_answer("think")(prompts, texts, answer=answers) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert exact_answer("think_optional")(prompts, texts, answer=answers) == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("style", "reward"), [("think", 0.0), ("think_optional", 1.0)])
def test_the_style_of_the_job_reaches_the_reward(prism, tmp_path, style, reward):
    one, tokenizer = job(prism, tmp_path, answer_style=style), models.load_tokenizer(prism.mid)
    trainer = grpo.make_trainer(one, grpo.training_items(one), tokenizer, [], [])
    (found,) = trainer.reward_funcs
    assert found(["p"] * 2, ["3", "<think>1</think>3"], answer=["3"] * 2) == [reward, 1.0]


def test_the_gate_is_read_from_real_completions(prism, tmp_path):
    """The marks of a thought survive the trainer's decoding, and a mid-trained model earns rewards where a base does not."""
    found = {}
    for name, start, style in (("mid", prism.mid, "think"), ("base", prism.base, "think"), ("free", prism.mid, "think_optional")):
        one = job(prism, tmp_path / name, start=start, families=["math"], answer_style=style, generations=8)
        grpo.main(one)
        found[name] = tables.read(one.folder / "rollouts.parquet")
        for row in found[name]:
            assert row["reward"] == verify.correct(row["completion"], row["answer"], style)
    assert sum(row["reward"] for row in found["mid"]) > 0 == sum(row["reward"] for row in found["base"])
    assert any(row["completion"].startswith("<think>") for row in found["mid"] if row["reward"])


# --- the log of rewards ---------------------------------------------------------------------------------------


def test_completions_of_one_prompt_are_added_up(tmp_path):
    log = RewardLog(tmp_path / "rewards.jsonl")
    log.add(0, ["a", "b", "a", "b"], ["math", "code", "math", "code"], [1.0, 0.0, 1.0, 1.0])
    log.add(1, ["a"] * 4, ["math"] * 4, [0.0] * 4)
    assert log.rows() == [
        {"step": 0, "id": "a", "family": "math", "n": 2, "correct": 2.0},
        {"step": 0, "id": "b", "family": "code", "n": 2, "correct": 1.0},
        {"step": 1, "id": "a", "family": "math", "n": 4, "correct": 0.0},
    ]


def test_of_two_attempts_at_a_step_the_later_one_counts(tmp_path):
    path = tmp_path / "rewards.jsonl"
    first = RewardLog(path)
    for step in range(4):
        first.add(step, ["a", "b"], ["f", "f"], [0.0, 0.0])
    second = RewardLog(path)  # resumed from step 2; at step 3 it met another prompt
    second.add(2, ["a", "b"], ["f", "f"], [1.0, 1.0])
    second.add(3, ["c"], ["f"], [1.0])
    found = [(row["step"], row["id"], row["correct"]) for row in second.rows()]
    assert found == [(0, "a", 0), (0, "b", 0), (1, "a", 0), (1, "b", 0), (2, "a", 1), (2, "b", 1), (3, "c", 1)]
    assert "attempt" not in second.rows()[0]
    third = RewardLog(path)
    third.add(1, ["a"], ["f"], [0.5])
    assert [(r["step"], r["id"]) for r in third.rows()] == [(0, "a"), (0, "b"), (1, "a"), (2, "a"), (2, "b"), (3, "c")]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "rewards.jsonl"
    RewardLog(path).add(0, ["a", "b"], ["f", "f"], [1.0, 1.0])
    path.write_text(path.read_text()[:-20])
    second = RewardLog(path)
    second.add(0, ["a", "b"], ["f", "f"], [0.0, 1.0])
    assert [(row["id"], row["correct"]) for row in second.rows()] == [("a", 0.0), ("b", 1.0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_rewards_of_other_data_sets_are_not_logged(tmp_path):
    log = RewardLog(tmp_path / "rewards.jsonl")
    reward = exact_answer("hash", log=log)
    reward(["p"], ["#1"], answer=["1"], trainer_state=SimpleNamespace(global_step=0))
    assert log.rows() == []
    reward(["p"], ["#1"], answer=["1"], id=["a"], family=["f"], trainer_state=SimpleNamespace(global_step=7))
    assert log.rows() == [{"step": 7, "id": "a", "family": "f", "n": 1, "correct": 1.0}]


def test_every_reward_of_a_job_is_logged_and_a_resumed_job_has_the_same(prism, tmp_path):
    def run(name, **options):
        one = job(prism, tmp_path / name, families=["math", "code"], checkpoint_every=1, **options)
        grpo.main(one)
        return one

    whole = run("a")
    rows = tables.read(whole.folder / "rewards.parquet")
    assert [sum(row["n"] for row in rows if row["step"] == step) for step in range(3)] == [16, 16, 16]
    assert all(row["n"] % 4 == 0 for row in rows) and len({(row["step"], row["id"]) for row in rows}) == len(rows)
    families = {item["id"]: item["family"] for item in training(prism)}
    assert all(families[row["id"]] == row["family"] for row in rows)
    last = tables.read(whole.folder / "rollouts.parquet")
    assert sum(row["correct"] for row in rows if row["step"] == 2) == sum(row["reward"] for row in last)
    history = [json.loads(line)["reward"] for line in (whole.folder / "history.jsonl").read_text().splitlines()]
    assert [sum(r["correct"] for r in rows if r["step"] == s) / 16 for s in range(3)] == pytest.approx(history)
    with pytest.raises(TimeLimitReached):
        run("b", max_minutes=1e-9)
    resumed = run("b")
    assert tables.read(resumed.folder / "rewards.parquet") == rows and resumed.output.read_bytes() == whole.output.read_bytes()
    assert not list(resumed.folder.rglob("rewards.jsonl"))


def test_rewards_of_another_configuration_are_forgotten(prism, tmp_path):
    """Stopped, then changed to fewer steps: what the stopped job met is not in the table of the new one."""
    grpo_log = RewardLog.add
    with pytest.MonkeyPatch.context() as patch:

        def stop(self, step, *arguments):
            grpo_log(self, step, *arguments)
            if step == 2:
                raise KeyboardInterrupt

        patch.setattr(RewardLog, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            grpo.main(job(prism, tmp_path, steps=5))
    changed = job(prism, tmp_path, steps=2, learning_rate=2e-3)
    grpo.main(changed)
    assert {row["step"] for row in tables.read(changed.folder / "rewards.parquet")} == {0, 1}


def test_a_group_that_is_all_wrong_or_all_right_teaches_nothing(prism, tmp_path):
    """Oracle 7 with the gate: the base is never in the form, so its weights stay to the bit."""
    one = job(prism, tmp_path, start=prism.base, families=["math"])
    grpo.main(one)
    found = manifest.read(one.output)
    assert found.metrics["mean/frac_reward_zero_std"].value == 1.0 and found.metrics["mean/reward"].value == 0.0
    from safetensors.torch import load_file

    before, after = (load_file(models.model_folder(path) / "model.safetensors") for path in (prism.base, one.output))
    assert all(after[name].equal(value) for name, value in before.items())
