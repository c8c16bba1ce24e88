"""Shares of tokens, exactly; epochs, honestly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import manifest, models, tables
from posttrain.core.config import JobConfig, settings, validate
from posttrain.core.errors import UserError
from posttrain.data import mix, tasks, tokenizer
from posttrain.data.mix import Config, Part, draw, main, texts


def place(root: Path, reference: str) -> Path:
    path = root / reference / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mix")
    found = {
        "task": place(root, "data/tasks/two_style"),
        "tokenizer": place(root, "data/tokenizer/style"),
        "prose": place(root, "data/corpus/prose"),
        "root": root,
    }
    tasks.main(tasks.Config(output=found["task"], kind="two_style", digits=3, train=80, validation=10, test=10))
    tokenizer.main(tokenizer.Config(output=found["tokenizer"], kind="characters", alphabet="0123456789=ab#"))
    rows = [
        {"split": split, "text": f"{i:03d}" * n} for n, split in ((4, "train"), (5, "validation"), (6, "test")) for i in range(12)
    ]
    manifest.publish(JobConfig(output=found["prose"]), {}, [tables.write(rows, found["prose"].parent / "documents.parquet")])
    return found


def job(world, root: Path, **values) -> Config:
    parts = {"two_style": {"share": 0.25, "field": "demonstration"}, "prose": {"share": 0.75, "field": "text"}}
    defaults = {
        "output": place(root, "data/mix/m"),
        "tokens": 1000,
        "held_out_tokens": 100,
        "parts": parts,
        "tokenizer": world["tokenizer"],
        "sources": {"two_style": world["task"], "prose": world["prose"]},
    }
    return Config(**{**defaults, **values})


documents = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=8)


@given(documents, st.integers(1, 200), st.integers(0, 5))
def test_draw_meets_the_budget_exactly(found, budget, seed):
    taken, epochs = draw(found, budget, seed)
    assert sum(map(len, taken)) == budget and epochs == len(taken) / len(found)
    assert all(document in found for document in taken[:-1])
    assert any(document[: len(taken[-1])] == taken[-1] for document in found)
    assert (taken, epochs) == draw(found, budget, seed)


@given(documents, st.integers(1, 200))
def test_no_document_comes_again_before_all_came(found, budget):
    named = [[i] * len(document) for i, document in enumerate(found)]
    taken, _ = draw(named, budget, 0)
    counts = Counter(document[0] for document in taken)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(len(found))) <= 1


def test_draw_follows_its_seed():
    named = [[i] for i in range(20)]
    orders = [[d[0] for d in draw(named, 20, seed)[0]] for seed in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20)) and orders[0] != orders[1] and orders[0] != list(range(20))


def test_shares_are_exact(world, tmp_path):
    main(one := job(world, tmp_path))
    rows, found = tables.read(one.output.parent / "documents.parquet"), manifest.read(one.output)
    counts = Counter()
    for row in rows:
        counts[row["split"], row["source"]] += len(row["input_ids"])
    assert counts == {
        ("train", "two_style"): 250,
        ("train", "prose"): 750,
        ("validation", "two_style"): 25,
        ("validation", "prose"): 75,
        ("test", "two_style"): 25,
        ("test", "prose"): 75,
    }
    assert [found.metrics[f"tokens/{s}"].value for s in ("train", "validation", "test", "two_style", "prose")] == [
        1000,
        100,
        100,
        250,
        750,
    ]
    realised = found.card["realised"]["prose"]  # 12 documents of 13 tokens: 57 whole ones and 9 tokens of another
    assert realised == {"tokens": 750, "documents": 58, "epochs": round(58 / 12, 4)}


def test_splits_come_from_their_own_split_and_end_in_eos(world, tmp_path):
    main(one := job(world, tmp_path))
    read = models.load_tokenizer(world["tokenizer"])
    for row in tables.read(one.output.parent / "documents.parquet", None, [("source", "=", "prose")]):
        text = read.decode(row["input_ids"])
        whole = {"train": 4, "validation": 5, "test": 6}[row["split"]] * 3 + 1
        assert len(row["input_ids"]) <= whole and (len(row["input_ids"]) < whole or text.endswith("<eos>"))
        assert "<pad>" not in text
    items = {r["prompt"] + r["demonstration"]: r["split"] for r in tables.read(world["task"].parent / "items.parquet")}
    for row in tables.read(one.output.parent / "documents.parquet", None, [("source", "=", "two_style")]):
        text = read.decode(row["input_ids"], skip_special_tokens=True)
        assert text not in items or items[text] == row["split"]


def test_fields(world):
    row = tables.read(world["task"].parent / "items.parquet", None, [("split", "=", "test")])[0]
    for field, answer in (("demonstration", row["demonstration"]), ("expression", row["answer"])):
        assert texts("x", Part(share=1, field=field), world["task"], "test")[0] == row["prompt"] + answer
    assert texts("x", Part(share=1, field="text"), world["prose"], "test")[1] == "001" * 6


def test_same_seed_same_bytes_other_seed_other_order(world, tmp_path):
    files = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        output = tmp_path / folder / "data/mix/m" / f"seed{seed}" / "manifest.json"
        output.parent.mkdir(parents=True)
        main(job(world, tmp_path, output=output, seed=seed))
        files.append((output.parent / "documents.parquet").read_bytes())
    assert files[0] == files[1] != files[2]


def test_parts_and_sources_must_name_the_same(world, tmp_path):
    with pytest.raises(
        UserError, match=r"--parts names \['prose', 'two_style'\], --sources \['two_style'\]; they must be the same"
    ):
        main(job(world, tmp_path, sources={"two_style": world["task"]}))


def test_damaged_source_is_named(world, tmp_path):
    broken = place(tmp_path, "data/corpus/broken")
    manifest.publish(
        JobConfig(output=broken), {}, [tables.write([{"split": "train", "text": "1"}], broken.parent / "documents.parquet")]
    )
    (broken.parent / "documents.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match=r"documents\.parquet differs from what"):
        main(job(world, tmp_path, sources={"two_style": world["task"], "prose": broken}))


def test_missing_split_is_named(world, tmp_path):
    only = place(tmp_path, "data/corpus/only")
    manifest.publish(
        JobConfig(output=only), {}, [tables.write([{"split": "train", "text": "1"}], only.parent / "documents.parquet")]
    )
    with pytest.raises(UserError, match=r"documents\.parquet has no rows for .*validation"):
        main(job(world, tmp_path, sources={"two_style": world["task"], "prose": only}))


def test_source_that_is_too_small_is_repeated_or_refused(world, tmp_path):
    parts = {"two_style": {"share": 0.25, "field": "demonstration"}, "prose": {"share": 0.75, "field": "text"}}
    refusing = {**parts, "prose": {**parts["prose"], "when_exhausted": "refuse"}}
    with pytest.raises(UserError, match=r"^source prose has 156 tokens in split train and its share is 750; set when_exhausted"):
        main(job(world, tmp_path, parts=refusing))
    main(one := job(world, tmp_path, parts=refusing, tokens=208))  # 156 tokens are 0.75 of 208: just enough
    assert manifest.read(one.output).card["realised"]["prose"] == {"tokens": 156, "documents": 12, "epochs": 1.0}
    main(job(world, tmp_path, parts=parts))  # repeated, as ever


def test_a_key_at_its_default_leaves_the_digest_of_older_mixes(world, tmp_path):
    found = settings(job(world, tmp_path))["parts"]["prose"]
    assert found == {"share": 0.75, "field": "text"}  # as JSON, which is what digests are made of
    assert Part(share=1, field="web", families=("math",)).model_dump(mode="json")["families"] == ["math"]
    refusing = Part(share=1, field="text", when_exhausted="refuse")
    assert refusing.model_dump()["when_exhausted"] == "refuse"


def test_a_part_that_would_get_nothing_is_named(world, tmp_path):
    parts = {"two_style": {"share": 0.001, "field": "demonstration"}, "prose": {"share": 0.999, "field": "text"}}
    with pytest.raises(
        UserError, match=r"^source two_style gets no token in split validation; raise its share or held_out_tokens"
    ):
        main(job(world, tmp_path, parts=parts))
    with pytest.raises(UserError, match=r"^source prose has no documents in split train; check the source's sizes"):
        mix.check("prose", Part(share=1, field="text"), [], 10, "train")
    for share, sentence in (
        (0, r"x: parts\.p\.share = 0: a part with a share of 0 is never read; delete it"),
        (0.5, "sum to 0.5, not 1"),
    ):
        values = {"output": "o", "parts": {"p": {"share": share, "field": "text"}}, "tokenizer": "t", "sources": {}}
        with pytest.raises(UserError, match=sentence):
            validate(Config, values, "x")


@pytest.fixture(scope="module")
def domains(tmp_path_factory) -> dict[str, Path]:
    """Items of three families with a raw web form in two of them, and a tokenizer for them."""
    root = tmp_path_factory.mktemp("domains")
    found = {"task": place(root, "data/domains/d"), "tokenizer": place(root, "data/tokenizer/d")}
    found["prose"] = found["task"]  # `job` names it
    rows = [
        {
            "split": split,
            "family": family,
            "prompt": f"{family[0]}{i}=",
            "answer": "1",
            "demonstration": f"<think>{i}</think>1",
            "web": "" if family == "science" else f"{family[0]}{i}{split[0]}. ",
        }
        for split in ("train", "validation", "test")
        for family in ("math", "code", "science")
        for i in range(7)
    ]
    manifest.publish(JobConfig(output=found["task"]), {}, [tables.write(rows, found["task"].parent / "items.parquet")])
    marks = ("<think>", "</think>")
    tokenizer.main(tokenizer.Config(output=found["tokenizer"], kind="characters", alphabet="0123456789mcstvr=. ", tokens=marks))
    return found


def test_families_and_web_forms(domains):
    def of(split="train", **values) -> list[str]:
        return texts("x", Part(share=1, **values), domains["task"], split)

    assert of(field="web", families=("math",)) == [f"m{i}t. " for i in range(7)]
    assert of("validation", field="web", families=("code",)) == [f"c{i}v. " for i in range(7)]
    assert sorted(of(field="web")) == sorted(f"{f}{i}t. " for f in "mc" for i in range(7))  # an empty form is no document
    assert of(field="demonstration", families=("science",)) == [f"s{i}=<think>{i}</think>1" for i in range(7)]
    assert sorted(of(field="expression", families=("math", "science"))) == sorted(f"{f}{i}=1" for f in "ms" for i in range(7))
    assert len(of(field="demonstration")) == 21


def test_each_part_of_a_mix_has_its_own_families(domains, tmp_path):
    parts = {
        "math": {"share": 0.5, "field": "demonstration", "families": ["math"]},
        "math_web": {"share": 0.25, "field": "web", "families": ["math"]},
        "science": {"share": 0.25, "field": "demonstration", "families": ["science"]},
    }
    sources = dict.fromkeys(parts, domains["task"])
    main(one := job(domains, tmp_path, parts=parts, sources=sources, tokens=400, held_out_tokens=80))
    read, firsts = models.load_tokenizer(domains["tokenizer"]), {"math": "m", "math_web": "m", "science": "s"}
    for row in tables.read(one.folder / "documents.parquet"):
        text = read.decode(row["input_ids"])
        assert text[0] == firsts[row["source"]]
        if len(text) > 2:  # the last document of a part is cut
            assert text[2] == (row["split"][0] if row["source"] == "math_web" else "=")


def test_families_that_leave_nothing_are_one_sentence(domains, tmp_path):
    def run(**part):
        main(job(domains, tmp_path, parts={"p": {"share": 1, **part}}, sources={"p": domains["task"]}))

    with pytest.raises(UserError, match=r"items\.parquet has no rows for .*family"):
        run(field="demonstration", families=["maths"])
    with pytest.raises(UserError, match=r"^source p has no documents in split train; check the source's sizes"):
        run(field="web", families=["science"])


def test_documents_that_are_tokenised_when_drawn_are_those_of_the_whole_corpus(domains, monkeypatch):
    """The same ids, cuts and epochs as from lists that were made beforehand; and only what was drawn is tokenised."""
    read = models.load_tokenizer(domains["tokenizer"])
    written = [f"m{i}t. " * (1 + i % 3) for i in range(40)]
    eager = [[*ids, read.eos_token_id] for ids in read(written, add_special_tokens=False)["input_ids"]]
    asked: list[str] = []

    class Watched:
        eos_token_id = read.eos_token_id

        def __call__(self, text, **options):
            asked.append(text)
            return read(text, **options)

    for budget in (1, 7, 100, sum(map(len, eager)), 1500):
        for seed in (0, 1):
            asked.clear()
            taken, epochs = draw(mix.Encoded(Watched(), written), budget, seed)
            assert (taken, epochs) == draw(eager, budget, seed)
            assert len(asked) == min(len(taken), len(written))  # each at most once
    lazy = mix.Encoded(read, written)
    assert len(lazy) == 40 and list(lazy) == eager and sum(map(len, lazy)) == sum(map(len, eager))


def test_module_announces_itself():
    assert mix.Config.model_fields["sources"].json_schema_extra == {"role": "input"}
