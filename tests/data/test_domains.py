"""Reasoning domains against an evaluator of their own: answers, scratchpads, slips, splits."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import manifest, tables
from posttrain.core.config import JobConfig, validate
from posttrain.core.errors import UserError
from posttrain.data import domains, verify
from posttrain.data.domains import Config, main, table

SIZES = {"train": 60, "validation": 10, "test": 15}


def job(root: Path, seed: int = 0, **values) -> Config:
    output = root / "data" / "domains" / "prism" / f"seed{seed}" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    return Config(**{"output": output, "seed": seed, "domains": {"math": SIZES, "code": SIZES}, **values})


@pytest.fixture(scope="module")
def capitals(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("facts") / "data/facts/capitals/seed0/manifest.json"
    output.parent.mkdir(parents=True)
    rows = [{"capital": f"City{chr(97 + i)}", "code": f"C{chr(65 + i)}", "region": ("Asia", "Europe")[i % 2]} for i in range(26)]
    manifest.publish(JobConfig(output=output), {}, [tables.write(rows, output.parent / "facts.parquet")])
    return output


# --- an evaluator that shares nothing with the generator: it reads the prompt --------------------------------


def relations(prompt: str, modulus: int):
    """(value at the start, one function per step) of a prompt of math or code."""
    if prompt[0] == "m":
        assert re.fullmatch(r"m\d+=", prompt)
        return 0, [lambda x, d=int(d): (x + d) % modulus for d in prompt[1:-1]]
    assert re.fullmatch(r"c\d[idnx]+=", prompt)
    meaning = {
        "i": lambda x: (x + 1) % modulus,
        "d": lambda x: (x + modulus - 1) % modulus,
        "n": lambda x: (modulus - x) % modulus,
        "x": lambda x: (x + x) % modulus,
    }
    return int(prompt[1]), [meaning[letter] for letter in prompt[2:-1]]


def run(prompt: str, modulus: int) -> list[int]:
    value, functions = relations(prompt, modulus)
    return list(itertools.accumulate(functions, lambda x, f: f(x), initial=value))[1:]


def broken(prompt: str, steps: str, modulus: int) -> list[int]:
    """Steps whose value does not follow from the value written before it."""
    value, functions = relations(prompt, modulus)
    before = [value, *map(int, steps)]
    return [i for i, (f, x, y) in enumerate(zip(functions, before, before[1:], strict=False)) if f(x) != y]


def parts(demonstration: str) -> tuple[str, str]:
    found = re.fullmatch(r"<think>(\w+)</think>(\w+)", demonstration)
    return found[1], found[2]


@pytest.mark.parametrize(("modulus", "steps"), [(2, 3), (3, 4), (5, 3), (10, 2)])
def test_every_item_of_math_and_code_by_brute_force(modulus, steps):
    for make, room in ((domains.math, modulus**steps), (domains.program, modulus * 4**steps)):
        items = [make(code, steps, modulus) for code in range(room)]
        assert len({item["prompt"] for item in items}) == room  # a prompt for each code: nothing comes twice
        for item in items:
            right = run(item["prompt"], modulus)
            assert len(right) == steps and item["steps"] == "".join(map(str, right)) and item["answer"] == str(right[-1])
            assert item["web"] == f"{item['prompt'][1:-1]} is {right[-1]}. "


def test_by_hand():
    assert domains.math(0 + 4 * 5 + 3 * 25, 3, 5) == {"prompt": "m043=", "answer": "2", "steps": "042", "web": "043 is 2. "}
    found = domains.program(3 + 5 * (3 + 4 * (2 + 4 * 1)), 3, 5)  # 3 doubled is 1, negated 4, one less 3
    assert found == {"prompt": "c3xnd=", "answer": "3", "steps": "143", "web": "3xnd is 3. "}


@given(st.integers(0, 5 * 4**5 - 1), st.integers(0, 4), st.integers(1, 4), st.sampled_from(["math", "program"]))
def test_a_slip_breaks_one_step_and_what_follows_goes_on_from_it(code, step, shift, kind):
    make = getattr(domains, kind)
    code %= 5**5 if kind == "math" else 5 * 4**5
    right, wrong = make(code, 5, 5), make(code, 5, 5, (step, shift))
    assert broken(wrong["prompt"], wrong["steps"], 5) == [step] and broken(right["prompt"], right["steps"], 5) == []
    assert wrong["steps"][:step] == right["steps"][:step]
    assert (int(wrong["steps"][step]) - int(right["steps"][step])) % 5 == shift
    assert {k: v for k, v in wrong.items() if k != "steps"} == {k: v for k, v in right.items() if k != "steps"}


# --- the table ------------------------------------------------------------------------------------------------


def every(root: Path, capitals: Path, **values) -> Config:
    sizes = {
        "math": {"train": 2000, "validation": 50, "test": 60},
        "code": {"train": 3000, "validation": 50, "test": 60},
        "science": {"train": 12, "validation": 4, "test": 10},
        "chat": {"train": 30, "validation": 5, "test": 5},
    }
    return job(root, **{"domains": sizes, "facts": capitals, **values})


def test_splits_are_disjoint_in_their_operands(tmp_path, capitals):
    one = every(tmp_path, capitals, slips=0.3)
    rows = table(one)
    for domain, sizes in one.domains.items():
        part = [row for row in rows if row["family"] == domain]
        assert [sum(r["split"] == s for r in part) for s in ("train", "validation", "test")] == [*sizes.model_dump().values()]
        assert len({row["prompt"] for row in part}) == len(part) and len({row["id"] for row in part}) == len(part)
    science = [row for row in rows if row["family"] == "science"]
    assert all(re.fullmatch(r"City[a-z]\?", row["prompt"]) for row in science) and len({row["prompt"] for row in science}) == 26
    known = {row["capital"]: row for row in tables.read(capitals.parent / "facts.parquet")}
    for row in science:
        fact = known[row["prompt"][:-1]]
        assert (row["answer"], row["demonstration"]) == (fact["region"], f"<think>{fact['code']}</think>{fact['region']}")
        assert row["web"] == ""
    for row in rows:
        if row["family"] == "chat":
            word = re.fullmatch(r"User: say ([a-z]{2,6})\nAssistant:", row["prompt"])[1]
            assert (row["demonstration"], row["answer"], row["web"]) == (f" {word}", word, "")


def test_slips_stand_in_the_training_split_alone_in_the_share_that_is_asked_for(tmp_path, capitals):
    share = 0.3
    one = every(tmp_path, capitals, slips=share)
    rows, counts = table(one), {}
    for row in rows:
        if row["family"] not in ("math", "code"):
            continue
        steps, conclusion = parts(row["demonstration"])
        assert len(steps) == 5 and conclusion == steps[-1]  # a wrong thought ends in its own conclusion
        assert row["answer"] == str(run(row["prompt"], 5)[-1])  # what is verified against is always right
        wrong = broken(row["prompt"], steps, 5)
        assert len(wrong) <= 1 and (row["split"] == "train" or wrong == [])
        if row["split"] == "train":
            counts.setdefault(row["family"], []).append(wrong)
            assert verify.correct(row["demonstration"], row["answer"], "think") == (not wrong)  # modulo a prime nothing heals
    for family, found in counts.items():
        n, slipped = len(found), [one[0] for one in found if one]
        assert abs(len(slipped) - share * n) < 4 * math.sqrt(share * (1 - share) * n), family
        for step in range(5):  # any step alike
            assert abs(slipped.count(step) - len(slipped) / 5) < 4 * math.sqrt(len(slipped) * 0.2 * 0.8), family
    main(one)
    total = sum(len([w for w in found if w]) for found in counts.values())
    assert manifest.read(one.output).metrics["wrong_demonstrations"].value == total > 0


def test_without_slips_every_demonstration_is_right_and_slips_change_nothing_else(tmp_path, capitals):
    plain, slipping = table(every(tmp_path, capitals)), table(every(tmp_path, capitals, slips=0.3))
    for row in plain:
        assert row["family"] == "chat" or verify.correct(row["demonstration"], row["answer"], "think")
    strip = [[{k: v for k, v in row.items() if k != "demonstration"} for row in rows] for rows in (plain, slipping)]
    assert strip[0] == strip[1]
    changed = [(a, b) for a, b in zip(plain, slipping, strict=True) if a != b]
    assert changed and all(a["split"] == "train" and a["family"] in ("math", "code") for a, _ in changed)
    main(one := every(tmp_path, capitals))
    assert manifest.read(one.output).metrics["wrong_demonstrations"].value == 0


def test_items_follow_the_seed_alone(tmp_path, capitals):
    bytes_of = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(one := job(tmp_path / name, seed, slips=0.2))
        bytes_of.append((one.folder / "items.parquet").read_bytes())
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]
    first, second = table(job(tmp_path, 0)), table(job(tmp_path, 1))
    assert [row["prompt"] for row in first] != [row["prompt"] for row in second]
    alone = table(job(tmp_path, domains={"code": SIZES}, slips=0.2))  # a domain does not depend on the others
    assert alone == [row for row in table(job(tmp_path, slips=0.2)) if row["family"] == "code"]


def test_whole_domains_fit_and_one_item_more_does_not(tmp_path):
    fits = {"math": {"train": 20, "validation": 2, "test": 3}, "code": {"train": 70, "validation": 5, "test": 5}}
    assert len(table(job(tmp_path, domains=fits, steps=2))) == 25 + 80
    for domain, room in (("math", 25), ("code", 80)):
        more = {domain: {**fits[domain], "train": fits[domain]["train"] + 1}}
        with pytest.raises(UserError, match=rf"^{domain}: {room} distinct items, {room + 1} wanted; lower its train, validation"):
            main(job(tmp_path, domains=more, steps=2))


def test_science_cannot_have_more_items_than_facts(tmp_path, capitals):
    with pytest.raises(UserError, match=r"^science: 26 distinct items, 27 wanted"):
        main(job(tmp_path, domains={"science": {"train": 20, "validation": 3, "test": 4}}, facts=capitals))
    values = {"output": str(tmp_path / "manifest.json"), "domains": {"science": SIZES}}
    with pytest.raises(UserError, match=r"^x: the domain science needs facts; name a data/facts job$"):
        validate(Config, values, "x")


def test_a_generator_that_is_wrong_publishes_nothing(tmp_path, monkeypatch):
    make = domains.math
    monkeypatch.setattr(domains, "math", lambda *a: {**make(*a), "answer": "7"})
    one = job(tmp_path)
    with pytest.raises(UserError, match=r"does not give '7'; the generator is wrong"):
        main(one)
    assert not one.output.exists()
