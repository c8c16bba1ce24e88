"""Counts of right answers per training prompt, the filter over them, and the solvability frontier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import generation, manifest, tables
from posttrain.core.errors import UserError
from posttrain.core.stats import pass_at_k
from posttrain.rl import passes

counts = st.lists(st.integers(0, 16), min_size=1, max_size=60)


# --- filter ---------------------------------------------------------------------------------------------------


@given(counts, st.integers(0, 16))
def test_filters(found, c):
    assert passes.select(found, exact=c).tolist() == [i for i, n in enumerate(found) if n == c]
    assert passes.select(found, at_least=c).tolist() == [i for i, n in enumerate(found) if n >= c]


@given(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=60), st.integers(1, 40), st.integers(0, 5))
def test_topping_up(found, size, seed):
    passing, zero = sum(n >= 1 for n in found), sum(n == 0 for n in found)
    if passing + zero < size:
        with pytest.raises(UserError, match=f"{passing} pass the filter and {zero} can top them up"):
            passes.select(found, at_least=1, size=size, top_up=0, seed=seed)
        return
    chosen = passes.select(found, at_least=1, size=size, top_up=0, seed=seed).tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == size
    assert sum(found[i] >= 1 for i in chosen) == min(size, passing)  # only what is missing is topped up
    assert chosen == passes.select(found, at_least=1, size=size, top_up=0, seed=seed).tolist()


def test_a_mix_is_never_smaller_than_it_says():
    with pytest.raises(UserError, match="2 pass the filter and 0 can top them up"):
        passes.select([0, 1, 1, 5], exact=1, size=3)
    assert passes.select([0, 1, 1, 5], exact=1, size=3, top_up=0).tolist() == [0, 1, 2]
    assert passes.select([1, 1], exact=1, size=2, top_up=1).tolist() == [0, 1]
    with pytest.raises(UserError, match="2 pass the filter and 0 can top"):
        passes.select([1, 1], exact=1, size=3, top_up=1)  # a prompt does not top itself up


def test_draws_differ_between_seeds_and_reach_every_prompt():
    drawn = [tuple(passes.select([1] * 10, exact=1, size=5, seed=seed)) for seed in range(30)]
    assert len(set(drawn)) > 10 and set(np.concatenate(drawn)) == set(range(10))


@pytest.mark.parametrize("given", [{}, {"exact": 1, "at_least": 1}])
def test_one_filter_is_wanted(given):
    with pytest.raises(UserError, match="either exact or at_least"):
        passes.select([1], **given)


# --- frontier -------------------------------------------------------------------------------------------------


def rows(correct: list[int], n: int = 16, ids=None) -> list[dict]:
    return [{"id": i, "n": n, "correct": c} for i, c in zip(ids or range(len(correct)), correct, strict=True)]


def test_frontier_follows_the_prompts_that_were_chosen_at_the_start():
    start = rows([0, 1, 0, 16, 1])
    steps = {
        100: rows([8, 16, 0, 0, 4]),
        0: rows([1, 2, 0, 15, 0]),
        50: rows([4, 1, 0], ids=[4, 1, 2], n=4) + rows([1, 1], n=4, ids=[0, 3]),
    }
    zero, one = passes.frontier(start, steps, correct=0), passes.frontier(start, steps, correct=1)
    assert [row["step"] for row in zero] == [0, 50, 100]
    assert [row["pass_rate"] for row in zero] == [1 / 32, 1 / 8, 1 / 4] and [row["n"] for row in zero] == [2, 2, 2]
    assert [row["pass_rate"] for row in one] == [1 / 16, 5 / 8, 5 / 8]
    assert zero[2]["se"] == pytest.approx(0.25) and passes.frontier(start, steps, correct=16)[0]["se"] is None


def test_prompts_never_solved_in_16_are_solved_now_and_then():
    """Regression to the mean: the choosing draw is no point of the curve."""
    rng = np.random.default_rng(0)
    rate = rng.beta(0.5, 2, size=4000)
    first, second = (rows(rng.binomial(16, rate).tolist()) for _ in range(2))
    (found,) = passes.frontier(first, {0: second}, correct=0)
    # posterior of p after 0 of 16 under Beta(0.5, 2)
    assert found["pass_rate"] == pytest.approx(0.5 / 18.5, abs=4 * found["se"]) and found["pass_rate"] > 0.02


def test_frontier_refuses_what_it_cannot_follow():
    with pytest.raises(UserError, match="no prompt had exactly 3"):
        passes.frontier(rows([0, 1]), {0: rows([0, 1])}, correct=3)
    with pytest.raises(UserError, match="step 7 has no counts for prompt 1"):
        passes.frontier(rows([1, 0]), {7: rows([1])}, correct=0)


# --- the job --------------------------------------------------------------------------------------------------


def job(tmp_path, world, **more) -> passes.Config:
    output = tmp_path / "rl" / "passes" / "two_style-base" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    return passes.Config(output=output, model=world.base, task=world.task, **more)


def test_counts_agree_with_verified_responses(world, tmp_path, monkeypatch):
    items = tables.read(world.task.parent / "items.parquet", None, [("split", "=", "train")])[:12]
    seen = {}

    def fake(model, tokenizer, prompts, *, count, **options):
        seen.update(options, count=count)
        good = [generation.Sample([2, 1], f"a#{item['answer']}", True) for item in items]
        bad = generation.Sample([2], "a#x", False)
        return [[good[i]] * (i % 5) + [bad] * (count - i % 5) for i in range(len(prompts))]

    monkeypatch.setattr(generation, "sample", fake)
    one = job(tmp_path, world, prompts=12, samples=4)
    passes.main(one)
    expected = [i % 5 for i in range(12)]
    found, table = manifest.read(one.output).metrics, tables.read(one.folder / "passes.parquet")
    assert [row["correct"] for row in table] == expected and {row["n"] for row in table} == {4}
    assert [row["id"] for row in table] == [item["id"] for item in items] and list(table[0]) == ["id", "family", "n", "correct"]
    assert found["pass_rate"].value == pytest.approx(np.mean(pass_at_k(np.full(12, 4), np.array(expected), 1)))
    assert found["pass_rate/two_style"] == found["pass_rate"] and found["finished"] == found["pass_rate"]
    shares = {name: found[f"share/{name}"].value for name in ("none", "one", "all")}
    assert shares == {"none": pytest.approx(3 / 12), "one": pytest.approx(3 / 12), "all": pytest.approx(2 / 12)}
    assert seen["temperature"] == 1.0 and seen["count"] == 4


def test_families_are_told_apart():
    table = [{"family": f, "n": 2, "correct": c} for f, c in (("a", 2), ("a", 1), ("b", 0))]
    found = passes.measures(table)
    assert found["pass_rate/a"].value == 0.75 and found["pass_rate/b"].value == 0 and found["pass_rate"].value == 0.5


def test_shuffled_counts_are_those_of_the_family_given_to_others(world, tmp_path):
    table = [{"id": f"{f}{i}", "family": f, "n": 16, "correct": i % 7 + (f == "b") * 8} for i in range(40) for f in "ab"]
    found = passes.shuffled(table, 3)
    assert [{**row, "correct": 0} for row in found] == [{**row, "correct": 0} for row in table] and found != table
    for f in "ab":
        old, new = (sorted(r["correct"] for r in rows if r["family"] == f) for rows in (table, found))
        assert old == new
    assert passes.shuffled(table, 3) == found != passes.shuffled(table, 4)
    plain, mixed = (
        job(tmp_path / "a", world, prompts=8, max_new_tokens=10),
        job(tmp_path / "b", world, prompts=8, max_new_tokens=10, shuffle=True),
    )
    for one in (plain, mixed):
        passes.main(one)
    assert manifest.read(plain.output).metrics == manifest.read(mixed.output).metrics


def test_the_job_samples_the_train_split_and_is_deterministic(world, tmp_path):
    written = []
    for name in ("one", "two"):
        one = job(tmp_path / name, world, prompts=8, max_new_tokens=10)
        passes.main(one)
        written.append(one.output.read_bytes())
    table = tables.read(one.folder / "passes.parquet")
    assert written[0] == written[1] and len(table) == 8
    assert all(row["id"].startswith("train-") and row["n"] == 16 for row in table)
