"""Reasoning domains against an evaluator of their own: answers, scratchpads, splits."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

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
def cities(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("facts") / "data/facts/cities/seed0/manifest.json"
    output.parent.mkdir(parents=True)
    rows = [{"city": f"City{chr(97 + i)}", "code": f"C{chr(65 + i)}", "continent": ("AS", "EU")[i % 2]} for i in range(26)]
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


# --- the table ------------------------------------------------------------------------------------------------


def every(root: Path, cities: Path, **values) -> Config:
    sizes = {
        "math": {"train": 2000, "validation": 50, "test": 60},
        "code": {"train": 3000, "validation": 50, "test": 60},
        "science": {"train": 12, "validation": 4, "test": 10},
        "chat": {"train": 30, "validation": 5, "test": 5},
    }
    return job(root, **{"domains": sizes, "facts": cities, **values})


def test_splits_are_disjoint_in_their_operands(tmp_path, cities):
    one = every(tmp_path, cities)
    rows = table(one)
    for domain, sizes in one.domains.items():
        part = [row for row in rows if row["family"] == domain]
        assert [sum(r["split"] == s for r in part) for s in ("train", "validation", "test")] == [*sizes.model_dump().values()]
        assert len({row["prompt"] for row in part}) == len(part) and len({row["id"] for row in part}) == len(part)
    science = [row for row in rows if row["family"] == "science"]
    assert all(re.fullmatch(r"City[a-z]\?", row["prompt"]) for row in science) and len({row["prompt"] for row in science}) == 26
    known = {row["city"]: row for row in tables.read(cities.parent / "facts.parquet")}
    for row in science:
        fact = known[row["prompt"][:-1]]
        thought = f"{fact['code']}. {fact['code']} {fact['continent']}"
        assert (row["answer"], row["demonstration"]) == (fact["continent"], f"<think>{thought}</think>{fact['continent']}")
        assert row["web"] == ""
    for row in rows:
        if row["family"] == "chat":
            word = re.fullmatch(r"User: say ([a-z]{2,6})\nAssistant:", row["prompt"])[1]
            assert (row["demonstration"], row["answer"], row["web"]) == (f" {word}", word, "")


def test_every_demonstration_is_right_and_its_thought_is_the_evaluators(tmp_path, cities):
    main(one := every(tmp_path, cities))
    for row in tables.read(one.folder / "items.parquet"):
        assert row["family"] == "chat" or verify.correct(row["demonstration"], row["answer"], "think")
        if row["family"] in ("math", "code"):
            steps = re.fullmatch(r"<think>(\d{5})</think>(\d)", row["demonstration"])
            assert [int(x) for x in steps[1]] == run(row["prompt"], 5) and steps[2] == row["answer"] == steps[1][-1]


def test_two_jobs_apart_share_no_prompt(tmp_path, cities):
    one = job(
        tmp_path,
        domains={"math": SIZES, "code": SIZES, "science": {"train": 8, "validation": 2, "test": 6}},
        facts=cities,
        steps=3,
    )
    main(one)
    apart = {"math": {"train": 40}, "code": {"train": 200}, "science": {"train": 10}}
    for seed in (0, 1):  # also with the numbers of another seed
        two = job(tmp_path / "two", seed, domains=apart, facts=cities, steps=3, apart_from=one.output)
        main(two)
        prompts = [{row["prompt"] for row in tables.read(x.folder / "items.parquet")} for x in (one, two)]
        assert len(prompts[1]) == 250 and not prompts[0] & prompts[1]
        assert {row["split"] for row in tables.read(two.folder / "items.parquet")} == {"train"}
    too_many = job(tmp_path / "three", domains={"science": {"train": 11}}, facts=cities, apart_from=one.output)
    with pytest.raises(UserError, match=r"^science: 10 distinct items apart from those of .*, 11 wanted; lower its train"):
        main(too_many)


def test_items_follow_the_seed_alone(tmp_path, cities):
    bytes_of = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(one := job(tmp_path / name, seed))
        bytes_of.append((one.folder / "items.parquet").read_bytes())
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]
    first, second = table(job(tmp_path, 0)), table(job(tmp_path, 1))
    assert [row["prompt"] for row in first] != [row["prompt"] for row in second]
    alone = table(job(tmp_path, domains={"code": SIZES}))  # a domain does not depend on the others
    assert alone == [row for row in table(job(tmp_path)) if row["family"] == "code"]


def test_whole_domains_fit_and_one_item_more_does_not(tmp_path):
    fits = {"math": {"train": 20, "validation": 2, "test": 3}, "code": {"train": 70, "validation": 5, "test": 5}}
    assert len(table(job(tmp_path, domains=fits, steps=2))) == 25 + 80
    for domain, room in (("math", 25), ("code", 80)):
        more = {domain: {**fits[domain], "train": fits[domain]["train"] + 1}}
        with pytest.raises(UserError, match=rf"^{domain}: {room} distinct items, {room + 1} wanted; lower its train, validation"):
            main(job(tmp_path, domains=more, steps=2))


def test_science_cannot_have_more_items_than_facts(tmp_path, cities):
    with pytest.raises(UserError, match=r"^science: 26 distinct items, 27 wanted"):
        main(job(tmp_path, domains={"science": {"train": 20, "validation": 3, "test": 4}}, facts=cities))
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
