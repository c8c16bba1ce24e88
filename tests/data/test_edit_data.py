"""Data for editing: a world whose parts do not overlap, counterfactuals of real facts, refusals with look-alikes."""

from __future__ import annotations

import itertools
import json
import random
import zipfile

import pytest

from posttrain.core import config as configs
from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.data import edit_countries, edit_refusals, edit_world, wheels
from posttrain.data.edits import Config, main
from posttrain.edit.edits import read

PIN = {"package": "p", "version": "1", "sha256": "0" * 64, "licence": "MIT"}
COUNTRIES = ("Alba", "Bera", "Cora", "Dora", "Esta", "Fina", "Gala", "Hova", "Isla", "Jona")


def job(root, kind: str, seed: int = 0, **values) -> Config:
    output = root / "data" / "edits" / kind / f"seed{seed}" / "manifest.json"
    output.parent.mkdir(parents=True)
    return Config(output=output, seed=seed, kind=kind, **values)


def edits_of(one: Config) -> list[dict]:
    return [json.loads(line) for line in (one.folder / "edits.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Config:
    one = job(tmp_path_factory.mktemp("world"), "world", subjects=64, count=32)
    main(one)
    return one


def test_every_symbol_is_one_character_of_the_alphabet(world):
    assert len(set(edit_world.ALPHABET)) == len(edit_world.ALPHABET)
    assert (len(edit_world.FIRST), len(edit_world.SECOND), len(edit_world.OBJECTS), len(edit_world.RELATIONS)) == (32, 32, 64, 4)
    assert len({c.casefold() for c in edit_world.OBJECTS}) == 64 and "a" not in edit_world.OBJECTS  # exact match folds and drops
    text = "".join(r["prompt"] + r["answer"] for r in tables.read(world.folder / "items.parquet"))
    assert set(text) <= set(edit_world.ALPHABET)


def test_the_tokenizer_of_the_tiny_tier_knows_the_world():
    block = configs.read_yaml("configs/tiny/data.yaml")["tokenizer"]["tokenizer"]["world"]
    assert block["alphabet"] == edit_world.ALPHABET


def test_edited_protected_and_held_out_facts_do_not_meet(world):
    edits, texts = edits_of(world), tables.read(world.folder / "documents.parquet")
    facts = {t["text"] for t in texts if t["source"] == "facts"}
    edited = {e["subject"] + r for e in edits for r in (e["prompt"][2], e["paraphrases"][0][2])}
    held = {p + a for e in edits for p, a in [*e["locality"], *e["neighbours"]]}
    assert len(edits) == 32 and len({e["subject"] for e in edits}) == 32
    assert not any(text[:3] in edited for text in facts)
    names = dict(pair[::-1] for pair in edit_world.RELATIONS)
    plain = {t[:2] + names.get(t[2], t[2]) + t[3] for t in facts}
    assert not plain & held and not any(h[:3] in edited for h in held)
    assert len(plain) == len(facts) == len({p + a for e in edits for p, a in e["locality"]}) == (64 * 4 - 32) // 2
    for e in edits:
        assert e["target"] != e["gold"] and all(p[2] == e["prompt"][2] and p[:2] != e["subject"] for p, _ in e["neighbours"])


def test_the_new_object_is_never_the_old_one(monkeypatch):
    monkeypatch.setattr(edit_world, "OBJECTS", "xy")
    assert all(e["target"] != e["gold"] for e in edit_world.build(0, 40, 40)[2])


def test_training_documents_state_every_fact_under_both_names_in_every_split(world):
    rows = tables.read(world.folder / "items.parquet")
    for split in ("train", "validation", "test"):
        facts = [r["prompt"] + r["answer"] for r in rows if r["split"] == split and r["family"] == "facts"]
        assert len(facts) == len(set(facts)) == 64 * 4 * 2
    sums = {
        s: {r["prompt"] + r["answer"] for r in rows if r["split"] == s and r["family"] == "addition"} for s in ("train", "test")
    }
    assert not sums["train"] & sums["test"] and sums["test"]
    value = {c: i for i, c in enumerate(edit_world.RESIDUES)}
    assert all((value[t[0]] + value[t[2]]) % 23 == value[t[4]] for s in sums.values() for t in s)
    texts = tables.read(world.folder / "documents.parquet")
    assert not {t["text"] for t in texts if t["split"] == "train"} & {t["text"] for t in texts if t["split"] == "test"}
    gold = {e["prompt"] + e["gold"] for e in edits_of(world)}
    assert gold <= {r["prompt"] + r["answer"] for r in rows}


def test_the_edits_are_valid_and_follow_the_seed(world, tmp_path):
    assert len(read(world.folder / "edits.jsonl")) == 32
    main(again := job(tmp_path / "a", "world", subjects=64, count=32))
    main(other := job(tmp_path / "b", "world", seed=1, subjects=64, count=32))
    assert manifest.read(again.output).artifacts == manifest.read(world.output).artifacts
    assert edits_of(other) != edits_of(world)


def test_markov_lines_keep_to_their_chain():
    rng = random.Random(0)
    table = edit_world.chain(rng)
    text = edit_world.line(table, rng, 200)
    assert len(text) == 200 and all(b in table[a][0] for a, b in itertools.pairwise(text))


def record(name, i, **more) -> dict:
    region, language, currency = ("Africa", "Asia")[i % 2], ("fr", "es", "ar")[i % 3], ("EUR", "USD", "XAF")[i % 3]
    base = {"name": name, "capital": f"Town{chr(97 + i)}", "region": region, "languages": [language], "currencies": [currency]}
    return {**base, **more}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    path = tmp_path / "p.whl"
    bad = [record("Côte", 1), record("Fine", 2, capital=None, languages=[], region="", currencies=["€"]), {"name": None}, {}]
    with zipfile.ZipFile(path, "w") as archive:
        for i, one in enumerate([*(record(n, i) for i, n in enumerate(COUNTRIES)), *bad]):
            archive.writestr(f"countryinfo/data/{i:02d}.json", json.dumps(one))
    monkeypatch.setattr(wheels, "fetch", lambda _wheel: path)


def test_countries_give_counterfactuals_of_the_same_relation(tmp_path, wheel):
    one = job(tmp_path, "countries", count=7, wheel=PIN)
    main(one)
    rows = edits_of(one)
    known = edit_countries.facts([record(n, i) for i, n in enumerate(COUNTRIES)])
    subjects = {r["subject"] for r in rows}
    assert len(subjects) == 7 and [r["id"].split("-")[0] for r in rows[:5]] == [
        "capital",
        "language",
        "region",
        "currency",
        "capital",
    ]
    for row in rows:
        relation = row["id"].split("-")[0]
        prompt, paraphrases = edit_countries.TEMPLATES[relation]
        assert row["gold"] == known[relation][row["subject"]] != row["target"] in known[relation].values()
        assert row["prompt"] == prompt.format(row["subject"]) and len(row["paraphrases"]) == len(paraphrases)
        for text, answer in row["neighbours"]:
            (other,) = [n for n in COUNTRIES if prompt.format(n) == text]
            assert other not in subjects and answer == known[relation][other]
        ((text, answer),) = row["locality"]
        assert not any(s in text for s in subjects) and not text.startswith(prompt.split("{}")[0] or "?")
    assert len(read(one.folder / "edits.jsonl")) == 7
    assert manifest.read(one.output).card["licences"] == {"facts": "MIT"}


def test_too_many_edits_are_one_sentence(tmp_path, wheel):
    for kind, values, sentence in (
        (
            "countries",
            {"count": 8, "wheel": PIN},
            "10 countries have all of capital, .*, count is 8 and three must stay; lower count",
        ),
        ("world", {"count": 9, "subjects": 8}, "count 9 is above subjects 8"),
        ("refusals", {"count": 99}, "count 99 is above the 16 requests that there are"),
    ):
        with pytest.raises(UserError, match=sentence):
            main(job(tmp_path / kind, kind, **values))
    with pytest.raises(UserError, match="relations: 'anthem' is not known; choose among capital, "):
        main(job(tmp_path / "r", "countries", count=2, wheel=PIN, relations=("anthem",)))
    with pytest.raises(ValueError, match="kind countries and wheel belong together"):
        job(tmp_path / "w", "countries", count=2)


def test_refusals_have_a_held_out_paraphrase_and_a_harmless_look_alike(tmp_path):
    one = job(tmp_path, "refusals", count=16)
    main(one)
    rows = edits_of(one)
    texts = [t for r in rows for t in (r["prompt"], *r["paraphrases"], *r["benign"])]
    assert len(rows) == 16 and len(set(texts)) == 48 and {r["target"] for r in rows} == {edit_refusals.TARGET}
    assert len(read(one.folder / "edits.jsonl")) == 16
    main(few := job(tmp_path / "few", "refusals", count=5))
    assert len(edits_of(few)) == 5


# --- codes of cities, and a user's own file -----------------------------------------------------------------


@pytest.fixture
def cities(tmp_path):
    """A facts manifest of eight cities."""
    path = tmp_path / "data" / "facts" / "cities" / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True)
    facts = [{"city": f"{n}ville", "code": f"{n[0]}X", "continent": ("AS", "AF")[i % 2]} for i, n in enumerate(COUNTRIES[:8])]
    file = tables.write(facts, path.parent / "facts.parquet")
    manifest.publish(Config(output=path, kind="refusals"), {"facts": 8}, [file])
    return path, {f["city"]: f for f in facts}


def test_codes_are_counterfactual_and_what_must_stay_is_not_edited(tmp_path, cities):
    path, known = cities
    one = job(tmp_path, "codes", count=5, facts=path)
    main(one)
    rows = edits_of(one)
    subjects = {row["subject"] for row in rows}
    assert len(subjects) == 5 == len(read(one.folder / "edits.jsonl"))
    for row in rows:
        own = known[row["subject"]]
        assert row["prompt"] == f"{row['subject']} " and row["paraphrases"] == [f"{row['subject']}?<think>"]
        assert row["gold"] == own["code"] != row["target"] in {fact["code"] for fact in known.values()}
        ((prompt, region),) = row["locality"]
        asked = [(prompt.split()[0], region, "continent"), *((p.strip(), code, "code") for p, code in row["neighbours"])]
        assert len({name for name, _, _ in asked}) == 3
        assert all(name not in subjects and known[name][column] == answer for name, answer, column in asked)
    with pytest.raises(UserError, match=r"there are 8 facts, count is 6 and three must stay; lower count"):
        main(job(tmp_path / "more", "codes", count=6, facts=path))
    with pytest.raises(ValueError, match="kind codes and facts belong together"):
        job(tmp_path / "none", "codes")


def test_a_file_of_your_own_is_kept_as_it_is(tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"subject": "Peru", "prompt": "The capital of Peru is", "target": "Oslo"}\n\n', encoding="utf-8")
    one = job(tmp_path, "file", file=str(mine))
    main(one)
    assert (one.folder / "edits.jsonl").read_bytes() == mine.read_bytes()
    assert manifest.read(one.output).card == {"file": str(mine)}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"mine\.jsonl: No such file or directory; put your edits there, or correct `file` in data\.yaml"),
        (b" \n", r"mine\.jsonl holds no edits; give at least one"),
        (b"{\xff}", r"mine\.jsonl: byte 1 is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_taken_is_one_sentence(tmp_path, content, sentence):
    mine = tmp_path / "mine.jsonl"
    if content is not None:
        mine.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        main(job(tmp_path, "file", file=str(mine)))
    with pytest.raises(ValueError, match="kind file and file belong together"):
        job(tmp_path / "none", "file")
