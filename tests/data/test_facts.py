"""Facts to memorise: usable records alone, the same in every split, questions that the documents answer."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import pytest

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.data import facts, wheels
from posttrain.data.facts import Config, main, triples

PIN = {"package": "p", "version": "1", "sha256": "0" * 64, "licence": "MIT"}


def record(capital="Berlin", code="DE", region="Europe", **more) -> dict:
    return {"capital": capital, "ISO": {"alpha2": code, "alpha3": "XXX"}, "region": region, "name": "x", **more}


def word(i: int, base: str = "Aa") -> str:
    return base + chr(97 + i // 26) + chr(97 + i % 26)


GOOD = [record(word(i), word(i, "")[-2:].upper(), ("Asia", "Europe", "Asia")[i % 3]) for i in range(12)]
BAD = [
    record("Bogotá", "CO", "Americas"),  # not ASCII
    record("Bern", "ÇH", "Europe"),
    record("Bern", "CH", "Europa é"),
    record("Santo Domingo", "DO", "Americas"),  # not letters alone
    record("Paris", "F1", "Europe"),
    record("Rome", "IT", "Southern Europe"),
    record("Reykjavikur", "IS", "Europe"),  # eleven letters
    record("", "AQ", "Polar"),
    record("Oslo", "", "Europe"),
    record("Oslo", "NO", ""),
    record("Oslo", None, "Europe"),
    record(None, "NO", "Europe"),
    record(["Oslo"], "NO", "Europe"),
    record("Oslo", "NO", 7),
    {"capital": "Oslo", "region": "Europe"},  # no code
    {"capital": "Oslo", "region": "Europe", "ISO": None},
    {"capital": "Oslo", "region": "Europe", "ISO": "NO"},
    {"capital": "Oslo", "region": "Europe", "ISO": {}},
    {},
]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Fill a wheel with records and have `fetch` return it."""

    def fill(records: list) -> None:
        path = tmp_path / "p-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for i, one in enumerate(records):
                archive.writestr(f"countryinfo/data/{i:03d}.json", json.dumps(one))
            archive.writestr("countryinfo/other.json", json.dumps(record("Outside", "OO", "Asia")))
            archive.writestr("countryinfo/data/readme.md", "no json")
        monkeypatch.setattr(wheels, "fetch", lambda _wheel: path)

    return fill


def job(root: Path, seed: int = 0, **values) -> Config:
    output = root / "data" / "facts" / "capitals" / f"seed{seed}" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    return Config(**{"output": output, "seed": seed, "wheel": PIN, "count": 12, **values})


def test_unusable_records_are_left_out_one_by_one():
    for one in BAD:
        assert triples([one], 9) == [], one
    assert triples([record("Reykjavikur", "IS", "Europe")], 11) == [("Reykjavikur", "IS", "Europe")]


def test_a_capital_and_a_code_come_once_and_the_order_of_the_records_does_not_show():
    twice = [record("Berlin", "DE", "Europe"), record("Berlin", "XX", "Asia"), record("Bonn", "DE", "Europe")]
    assert triples(twice, 9) == [("Berlin", "DE", "Europe")]
    found = triples(GOOD + BAD, 9)
    assert found == sorted((r["capital"], r["ISO"]["alpha2"], r["region"]) for r in GOOD)
    mixed = GOOD + BAD
    random.Random(1).shuffle(mixed)
    assert triples(mixed, 9) == found


def test_the_same_facts_stand_in_every_split_and_answer_the_questions(wheel, tmp_path):
    wheel([*GOOD, *BAD, ["a list"], "text", None])
    one = job(tmp_path)
    main(one)
    documents = tables.read(one.folder / "documents.parquet")
    by_split = {split: [row["text"] for row in documents if row["split"] == split] for split in facts.SPLITS}
    assert by_split["train"] == by_split["validation"] == by_split["test"] and len(documents) == 3 * 12
    known = {r["capital"]: (r["ISO"]["alpha2"], r["region"]) for r in GOOD}
    assert sorted(by_split["train"]) == sorted(f"{c} {k}. {k} {r}." for c, (k, r) in known.items())
    questions = tables.read(one.folder / "items.parquet")
    assert [sum(q["hop"] == hop for q in questions) for hop in ("capital", "region")] == [12, 12]
    for question in questions:
        whole = question["prompt"] + question["answer"] + "."
        (document,) = [text for text in by_split["train"] if text.startswith(whole)]  # each is the beginning of one document
        capital = document.split()[0]
        assert question["answer"] == known[capital][question["hop"] == "region"]
    assert len({q["id"] for q in questions}) == 24
    columns = tables.read(one.folder / "facts.parquet")
    assert {(r["capital"], r["code"], r["region"]) for r in columns} == {(c, *v) for c, v in known.items()}
    found = manifest.read(one.output)
    assert found.metrics["facts"].value == 12 and found.metrics["majority_region"].value == pytest.approx(8 / 12)
    assert found.card["regions"] == {"Asia": 8, "Europe": 4}


def test_count_takes_facts_in_seeded_order(wheel, tmp_path):
    wheel(GOOD)

    def chosen(name: str, **values) -> list[str]:
        main(one := job(tmp_path / name, **values))
        return [row["capital"] for row in tables.read(one.folder / "facts.parquet")]

    every = chosen("every")
    assert chosen("some", count=5) == every[:5] and chosen("again") == every and every != sorted(every)
    assert chosen("other", seed=1) != every and sorted(chosen("other", seed=1)) == sorted(every)


def test_too_few_countries_are_one_sentence(wheel, tmp_path):
    wheel(GOOD + BAD)
    one = job(tmp_path, count=13)
    with pytest.raises(UserError, match=r"^12 countries are usable, count is 13; lower count or raise max_letters\.$"):
        main(one)
    assert not one.output.exists()
