"""Generators: every demonstration verifies, no item twice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.data import families
from posttrain.data.families import DIGITS, OWN, addition, column_addition, permutation, reasoning, two_style, two_style_response
from posttrain.data.verify import correct, extract

GYM = {"chain_sum": {"min_terms": 2, "max_terms": 3}, "gcd": {"max_numbers": 2}, "letter_counting": {}}


# --- two styles -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_permutation_is_a_derangement(seed):
    found = permutation(seed)
    assert (
        sorted(found) == list(DIGITS) and all(a != b for a, b in zip(found, DIGITS, strict=True)) and found == permutation(seed)
    )


def test_permutations_differ():
    assert len({permutation(seed) for seed in range(50)}) > 45


def test_two_style_by_hand():
    """Running sums of 3, 8, 5 modulo 10: 3, 1, 6."""
    assert two_style_response("385", "a", OWN) == "a316#6"
    assert two_style_response("385", "b", OWN) == "bTRW#6"
    assert two_style_response("385", "b", "1234567890") == "b427#6"


@pytest.mark.parametrize("symbols", [OWN, permutation(3)])
def test_two_style_items(symbols):
    rows = two_style(300, 1, length=4, symbols=symbols)
    assert len({row["prompt"] for row in rows}) == 300 and rows == two_style(300, 1, length=4, symbols=symbols)
    assert rows != two_style(300, 2, length=4, symbols=symbols)
    for row in rows:
        digits = re.fullmatch(r"(\d{4})=", row["prompt"])[1]
        sums = [sum(map(int, digits[: i + 1])) % 10 for i in range(4)]
        assert row["demonstration"] == f"a{''.join(map(str, sums))}#{sums[-1]}" and row["answer"] == str(sums[-1])
        assert row["alternative"] == f"b{''.join(symbols[s] for s in sums)}#{sums[-1]}" and row["family"] == "two_style"
        assert correct(row["demonstration"], row["answer"], "hash") and correct(row["alternative"], row["answer"], "hash")
        assert not correct(row["demonstration"], str((sums[-1] + 1) % 10), "hash")


def test_two_style_uses_every_prompt_but_none_twice():
    assert len({row["prompt"] for row in two_style(100, 0, length=2, symbols=OWN)}) == 100
    with pytest.raises(UserError, match=r"101 items do not fit into 10\^2 prompts; raise digits or lower the sizes"):
        two_style(101, 0, length=2, symbols=OWN)


# --- column addition ------------------------------------------------------------------------------------------


def test_column_addition_by_hand():
    assert column_addition(345, 278) == "5+8+0=13,4+7+1=12,3+2+1=06#0623"
    assert column_addition(999, 1) == "9+1+0=10,9+0+1=10,9+0+1=10#1000" and column_addition(0, 0) == "0+0+0=00#00"


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_column_addition_steps_are_true_and_verify(a, b):
    text = column_addition(a, b)
    steps, mark, answer = text.partition("#")
    width = max(len(str(a)), len(str(b)))
    assert mark and int(answer) == a + b and len(answer) == width + 1 and correct(text, str(a + b), "hash")
    carry, total = 0, 0
    for i, step in enumerate(steps.split(",")):
        x, y, c, s = map(int, re.fullmatch(r"(\d)\+(\d)\+([01])=(\d\d)", step).groups())
        assert c == carry and x + y + c == s and (x, y) == (a // 10**i % 10, b // 10**i % 10)
        carry, total = s // 10, total + s % 10 * 10**i
    assert i + 1 == width and total + carry * 10**width == a + b
    assert not correct(text, str(a + b + 1), "hash")


# --- reasoning-gym --------------------------------------------------------------------------------------------


def test_addition_items():
    rows = addition(200, 3, digits=2)
    assert len({row["prompt"] for row in rows}) == 200 and rows == addition(200, 3, digits=2)
    for row in rows:
        a, b = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups())
        assert int(row["answer"]) == a + b and row["demonstration"] == column_addition(a, b)
        assert correct(row["demonstration"], row["answer"], "hash")


def test_addition_runs_out():
    with pytest.raises(UserError, match=r"addition: only \d+ distinct items of 5000 with 1 digits; raise digits"):
        addition(5000, 0, digits=1)


def test_reasoning_items():
    rows = reasoning(60, 5, families=GYM, instruction="Put the final answer in \\boxed{}.")
    assert rows == reasoning(60, 5, families=dict(reversed(GYM.items())), instruction="Put the final answer in \\boxed{}.")
    assert len(rows) >= 60 and {row["family"] for row in rows} == set(GYM)
    assert min(sum(row["family"] == name for row in rows) for name in GYM) >= 20
    for row in rows:
        assert correct(row["demonstration"], row["answer"], "boxed") and row["prompt"].endswith(
            " Put the final answer in \\boxed{}."
        )
        assert row["answer"].strip() and not correct(row["prompt"], row["answer"], "boxed")  # an echo earns nothing
        assert extract(row["demonstration"], "boxed") == row["answer"].strip()
    assert [row["family"] for row in rows] != sorted(row["family"] for row in rows)


def test_reasoning_leaves_out_items_without_an_answer(monkeypatch):
    entries = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(["1", None, "", "  ", 2, "x"])]
    monkeypatch.setattr(families, "_gym", lambda *_: entries)
    assert sorted(row["answer"] for row in reasoning(3, 0, families={"f": {}}, instruction="")) == ["1", "2", "x"]


def test_reasoning_has_enough_items_though_every_second_has_no_answer(monkeypatch):
    def gym(name, size, seed, options):
        return [{"question": f"{name} {i}", "answer": str(i) if i % 2 else None} for i in range(size)]

    monkeypatch.setattr(families, "_gym", gym)
    rows = reasoning(7, 0, families={"a": {}, "b": {}}, instruction="")
    assert len({row["prompt"] for row in rows}) >= 7 and {row["family"] for row in rows} == {"a", "b"}


def test_wrong_families_are_named():
    with pytest.raises(UserError, match="reasoning-gym has no family 'chain_sums'; did you mean 'chain_sum'"):
        reasoning(3, 0, families={"chain_sums": {}}, instruction="")
    with pytest.raises(UserError, match=r"'chain_sum' refuses \{'terms': 3\}"):
        reasoning(3, 0, families={"chain_sum": {"terms": 3}}, instruction="")
    with pytest.raises(UserError, match=r"'chain_sum' refuses \{'min_terms': 5, 'max_terms': 2\}"):
        reasoning(3, 0, families={"chain_sum": {"min_terms": 5, "max_terms": 2}}, instruction="")
    with pytest.raises(UserError, match="families is empty"):
        reasoning(3, 0, families={}, instruction="")
