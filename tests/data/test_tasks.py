"""Items in disjoint splits, every demonstration checked, the same file each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.data import decontamination, families, tasks
from posttrain.data.tasks import Config, answer_style, distinct, generate, main
from posttrain.data.verify import correct

KINDS = {
    "two_style": {"kind": "two_style", "digits": 3},
    "own_symbols": {"kind": "two_style", "digits": 3, "own_symbols": True},
    "addition": {"kind": "addition", "digits": 2},
    "reasoning": {"kind": "reasoning", "families": {"chain_sum": {"min_digits": 2, "max_digits": 3}, "gcd": {}}},
}


def job(root: Path, name: str = "x", seed: int = 0, **values) -> Config:
    output = root / "data" / "tasks" / name / f"seed{seed}" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    return Config(**{"output": output, "seed": seed, "train": 100, "validation": 20, "test": 30, **values})


def items(one: Config) -> list[dict]:
    return tables.read(one.output.parent / "items.parquet")


@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)
def test_splits(tmp_path, values):
    one = job(tmp_path, **values)
    main(one)
    rows, style = items(one), answer_style(one.kind)
    by_split = {split: {row["prompt"] for row in rows if row["split"] == split} for split in ("train", "validation", "test")}
    assert {split: len(prompts) for split, prompts in by_split.items()} == {"train": 100, "validation": 20, "test": 30}
    assert len(set().union(*by_split.values())) == 150 == len({row["id"] for row in rows})
    assert all(correct(row["demonstration"], row["answer"], style) for row in rows)
    found = manifest.read(one.output)
    assert found.metrics["items/train"].value == 100 and found.metrics["overlap/identical_items"].value == 0
    assert found.card["answer_style"] == style and sum(found.card["families"].values()) == 150
    assert found.card["example"]["prompt"] in by_split["test"]


def test_same_seed_same_bytes_other_seed_other_items(tmp_path):
    files = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        one = job(tmp_path / folder, seed=seed, **KINDS["two_style"])
        main(one)
        files.append((one.output.parent / "items.parquet").read_bytes())
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)
def test_prompts_follow_the_seed(tmp_path, values):
    prompts = [[row["prompt"] for row in generate(job(tmp_path, seed=seed, **values), 50)] for seed in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_secret_permutation_follows_the_seed_and_style_b_needs_it(tmp_path):
    letters = {}
    for seed in (0, 1):
        rows = generate(job(tmp_path, seed=seed, **KINDS["two_style"]), 200)
        found = {(a, b) for row in rows for a, b in zip(row["demonstration"][1:4], row["alternative"][1:4], strict=True)}
        letters[seed] = dict(found)
        assert len(found) == 10 and all(a != b for a, b in found)
    assert letters[0] != letters[1]
    own = generate(job(tmp_path, **KINDS["own_symbols"]), 50)
    assert {c for row in own for c in row["alternative"][1:4]} <= set(families.OWN)


def test_test_items_do_not_depend_on_how_many_training_items_are_taken(tmp_path):
    """Not promised, and not so: the sample is drawn as a whole. Arms share one task, so nothing rests on it."""
    one, other = job(tmp_path, "a", **KINDS["two_style"]), job(tmp_path, "b", train=200, **KINDS["two_style"])
    main(one), main(other)
    assert manifest.read(one.output).config_digest != manifest.read(other.output).config_digest


def test_distinct_folds_case_space_and_punctuation():
    rows = [
        {"prompt": p, "n": i}
        for i, p in enumerate(["What is 2+3?", "what  is\n2 + 3", "What is 2-3?", "What is 2+3 ?!", "WHAT IS 23"])
    ]
    assert [row["n"] for row in distinct(rows)] == [0, 2, 4]


def test_duplicates_across_splits_are_removed_and_counted(tmp_path, monkeypatch):
    rows = families.two_style(160, 0, length=3, symbols=families.OWN)
    copies = [{**row, "prompt": row["prompt"].replace("=", " =")} for row in rows[:40]]
    monkeypatch.setattr(tasks, "generate", lambda *_: rows + copies)
    one = job(tmp_path, **KINDS["two_style"])
    main(one)
    assert manifest.read(one.output).metrics["duplicates_removed"].value == 40
    words = [tuple(decontamination.WORD.findall(row["prompt"])) for row in items(one)]
    assert len(set(words)) == 150


def test_too_few_distinct_items(tmp_path, monkeypatch):
    rows = families.two_style(100, 0, length=3, symbols=families.OWN)
    monkeypatch.setattr(tasks, "generate", lambda *_: rows + rows)
    one = job(tmp_path, **KINDS["two_style"])
    with pytest.raises(UserError, match="two_style: 100 distinct items for 150 wanted; lower train, validation or test"):
        main(one)
    assert not one.output.exists()


@pytest.mark.parametrize("wrong", ["a000#9", "a000", "a000##1"])
def test_a_generator_that_is_wrong_is_found(tmp_path, monkeypatch, wrong):
    rows = families.two_style(150, 0, length=3, symbols=families.OWN)
    rows[70]["demonstration"] = wrong
    rows[70]["answer"] = "1"
    monkeypatch.setattr(tasks, "generate", lambda *_: rows)
    with pytest.raises(UserError, match=f"demonstration '{wrong}' does not give '1'; the generator is wrong"):
        main(job(tmp_path, **KINDS["two_style"]))


def test_overlap_between_splits_is_reported(tmp_path, monkeypatch):
    rows = families.two_style(150, 0, length=3, symbols=families.OWN)
    for i, row in enumerate(rows):
        row["prompt"] = " ".join(f"w{j}" for j in range(20)) + f" {i}"
    monkeypatch.setattr(tasks, "generate", lambda *_: rows)
    one = job(tmp_path, **KINDS["two_style"])
    main(one)
    metrics = manifest.read(one.output).metrics
    assert metrics["overlap/mean"].value == pytest.approx(8 / 9) and metrics["overlap/identical_items"].value == 0
