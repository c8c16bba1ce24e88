"""The jobs: world, factors, edits, scorecard; edits from a file without a manifest; what a user gets wrong."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from posttrain.base import scratch
from posttrain.core import cli, manifest, models, tables
from posttrain.core.errors import UserError
from posttrain.data import edit_world, mix, tokenizer
from posttrain.data import edits as data
from posttrain.edit import crispedit, factors, measure
from posttrain.evaluate import retention

LAYERS = ("*.mlp.down_proj",)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> SimpleNamespace:
    """A base that knows 4 facts of each of 12 subjects, and edits of 6 of them."""
    root = tmp_path_factory.mktemp("edit") / "results" / "test"

    def out(reference: str):
        path = root / reference / "seed0" / "manifest.json"
        path.parent.mkdir(parents=True)
        return path

    edits, words, mixed, base = (out(r) for r in ("data/edits/w", "data/tokenizer/w", "data/mix/w", "base/scratch/w"))
    data.main(data.Config(output=edits, kind="world", subjects=12, count=6))
    tokenizer.main(tokenizer.Config(output=words, kind="characters", alphabet=edit_world.ALPHABET))
    parts = {
        "facts": {"share": 0.7, "field": "expression", "families": ["facts"]},
        "markov": {"share": 0.3, "field": "expression", "families": ["markov"]},
    }
    mix.main(
        mix.Config(
            output=mixed, tokens=20_000, held_out_tokens=500, parts=parts, tokenizer=words, sources=dict.fromkeys(parts, edits)
        )
    )
    shape = models.Shape(hidden=32, layers=2, heads=2, intermediate=64, context=32)
    options = {"learning_rate": 0.01, "schedule": "cosine", "batch_size": 16}
    scratch.main(scratch.Config(output=base, shape=shape, length=32, steps=120, mix=mixed, tokenizer=words, **options))
    return SimpleNamespace(root=root, out=out, edits=edits, base=base, tokenizer=words)


def job(world, name: str, **values) -> crispedit.Config:
    common = {"model": world.base, "edits": world.edits, "capability": world.edits, "layers": LAYERS, "leading_space": False}
    size = {"texts": 60, "tokens": 24, "drift_texts": 20, "drift_tokens": 24, "drift_sources": ("markov", "addition")}
    fit = {"learning_rate": 0.005, "epochs": 60, "batch": 6, "max_new_tokens": 4, "gamma": 0.9}
    return crispedit.Config(output=world.out(f"edit/crispedit/{name}"), **{**common, **size, **fit, **values})


@pytest.fixture(scope="module")
def arms(world) -> dict[str, crispedit.Config]:
    """Jobs of three arms, done."""
    more = {"ft": {"projection": "none"}, "step": {"projection": "step"}, "seq": {"projection": "grad", "chunk": 3}}
    jobs = {name: job(world, f"world-{name}", **values) for name, values in more.items()}
    for one in jobs.values():
        crispedit.main(one)
    return jobs


def test_the_scorecard_has_a_row_per_edit_and_per_text(world, arms):
    for name, one in arms.items():
        found = manifest.read(one.output)
        rows, texts = tables.read(one.folder / "edits.parquet"), tables.read(one.folder / "drift.parquet")
        assert len(rows) == 6 and {t["source"] for t in texts} == {"markov", "addition"} and len(texts) == 40
        scores = ("efficacy", "paraphrase", "locality", "neighbour", "free", "free_paraphrase", "prefers_new", "before_known")
        assert all(0 <= row[s] <= 1 for row in rows for s in scores)
        success = 0.8 if name != "seq" else 0.5  # later chunks overwrite earlier ones
        assert found.metrics["efficacy"].value >= success and found.metrics["before/efficacy"].value <= 0.2
        assert found.metrics["before/known"].value >= 0.8  # the base knew what was edited
        assert found.metrics["efficacy"].n == 6 and found.metrics["drift/kl"].n == 40
        assert found.metrics["drift/kl"].value == pytest.approx(sum(t["kl"] for t in texts) / 40)
        assert ("edit/free_directions" in found.metrics) == (name != "ft")
        timing = json.loads((one.folder / "provenance.json").read_text())["timings"]
        assert {"factors", "edit", "step", "projecting"} <= timing.keys()


def test_the_edited_model_is_a_checkpoint_of_the_dag_and_scores_as_recorded(world, arms):
    one = arms["ft"]
    model, words = models.load(one.output), models.load_tokenizer(one.output)
    rows = tables.read(one.folder / "edits.parquet")
    texts = measure.generate(
        model, words, [words(r["prompt"])["input_ids"] for r in rows], max_new_tokens=4, end=measure.stops(words)
    )
    assert [float(measure.exact(t, r["target"])) for t, r in zip(texts, rows, strict=True)] == [r["free"] for r in rows]
    output = world.out("evaluate/retention/w-ft")
    retention.main(retention.Config(output=output, model=one.output, corpus=world.edits, documents=8, tokens=16))
    assert manifest.read(output).metrics["loss"].value > 0


def test_the_same_job_gives_the_same_manifest(world, arms):
    again = job(world, "world-again", projection="step")
    crispedit.main(again)
    one, two = (manifest.read(j.output) for j in (arms["step"], again))
    assert one.metrics == two.metrics and one.artifacts == two.artifacts


def test_shared_factors_give_the_same_edit(world, arms):
    shared = factors.Config(
        output=world.out("edit/factors/w"), model=world.base, capability=world.edits, layers=LAYERS, texts=60, tokens=24
    )
    factors.main(shared)
    assert manifest.read(shared.output).metrics["texts"].value == 60
    one = job(world, "world-shared", projection="step", factors=shared.output)
    crispedit.main(one)
    assert manifest.read(one.output).metrics == manifest.read(arms["step"].output).metrics
    with pytest.raises(UserError, match=r"factors\.safetensors has no factors of layer .*up_proj"):
        crispedit.main(job(world, "world-other", layers=("*.up_proj",), factors=shared.output))
    with pytest.raises(UserError, match=r"was computed for other weights of"):
        crispedit.main(job(world, "world-edited", model=arms["ft"].output, factors=shared.output))


def test_a_users_file_needs_no_manifest(world, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    rows = [json.loads(line) for line in (world.edits.parent / "edits.jsonl").read_text().splitlines()]
    bare = [{k: row[k] for k in ("subject", "prompt", "target")} for row in rows[:2]]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in bare))
    output = world.out("edit/crispedit/mine")
    words = [
        "--output",
        output,
        "--model",
        world.base,
        "--edits",
        file,
        "--capability",
        world.edits,
        "--layers",
        '["*.down_proj"]',
    ]
    words += ["--leading-space", "false", "--tokens", "24", "--texts", "40", "--epochs", "2", "--max-new-tokens", "2"]
    assert cli.run(crispedit.Config, crispedit.main, list(map(str, words))) == 0
    found = manifest.read(output)
    assert found.card["edits"] == 2 and not {"paraphrase", "locality", "before/known"} & found.metrics.keys()
    assert found.inputs["edits"] == manifest.sha256(file)
    file.write_text(json.dumps({**bare[0], "subject": "nobody"}))
    assert cli.run(crispedit.Config, crispedit.main, list(map(str, words))) == 2
    assert f"error: {file}:1: the subject 'nobody' does not stand in the prompt" in capsys.readouterr().err


def test_text_that_states_an_edited_fact_is_warned_of(world, capsys):
    first = json.loads((world.edits.parent / "edits.jsonl").read_text().splitlines()[0])
    rows = tables.read(world.edits.parent / "documents.parquet")
    output = world.out("data/corpus/stating")
    stating = [{"id": f"x{i}", "split": "train", "source": "x", "text": first["prompt"] + first["gold"]} for i in range(2)]
    manifest.publish(
        data.Config(output=output, kind="refusals"), {}, [tables.write([*stating, *rows], output.parent / "documents.parquet")]
    )
    one = job(world, "world-stated", capability=output, epochs=1)
    crispedit.main(one)
    assert "warning: 2 of 60 capability texts of" in capsys.readouterr().err
    assert manifest.read(one.output).metrics["capability_texts_with_edits"].value == 2


def test_text_behind_the_factors_cannot_measure_drift(world):
    rows = tables.read(world.edits.parent / "documents.parquet")
    shared = next(r for r in rows if r["split"] == "test" and r["source"] == "markov")
    output = world.out("data/corpus/leaking")
    table = tables.write([{**shared, "split": "train", "id": "leak"}, *rows], output.parent / "documents.parquet")
    manifest.publish(data.Config(output=output, kind="refusals"), {}, [table])
    with pytest.raises(UserError, match=r"1 texts of .* are in its train and its test split"):
        crispedit.main(job(world, "world-leaking", capability=output, drift_texts=64))
    with pytest.raises(UserError, match=r"has no document of the source 'plays' in split test"):
        crispedit.main(job(world, "world-source", drift_sources=("plays",)))


def test_refusals_are_counted_before_and_after_and_where_they_should_not_be(world, monkeypatch):
    file = world.root / "unsafe.jsonl"
    edits = [{"subject": "AБ", "prompt": "AБ", "target": "б", "paraphrases": ["BВ"], "benign": ["CГ", "DД"]}]
    file.write_text("\n".join(json.dumps(e) for e in edits))
    said = iter([["no", "no", "no", "no"], ["I can't", "no", "I'm sorry", "no"]])
    monkeypatch.setattr(measure, "generate", lambda *a, **k: next(said))
    one = job(world, "refusals-ft", edits=file, measure="refusals", chat=True, projection="none", epochs=1)
    crispedit.main(one)
    found = {n: m.value for n, m in manifest.read(one.output).metrics.items()}
    assert (found["refusal"], found["refusal_paraphrase"], found["over_refusal"]) == (1.0, 0.0, 0.5)
    assert found["before/refusal"] == found["before/over_refusal"] == 0.0
    responses = tables.read(one.folder / "responses.parquet")
    assert [r["kind"] for r in responses] == ["prompt", "paraphrase", "benign", "benign"] and responses[0]["after"] == "I can't"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gamma": 1.2}, "gamma"),
        ({"context": "Q:"}, r"context should hold \{\} once"),
        ({"measure": "refusals"}, "measure refusals needs chat true"),
        ({"projection": "both"}, "'none', 'grad' or 'step'"),
    ],
)
def test_settings_that_cannot_be(world, tmp_path, values, sentence):
    common = {"model": world.base, "edits": world.edits, "capability": world.edits}
    with pytest.raises(ValueError, match=sentence):
        crispedit.Config(output=tmp_path / "manifest.json", **common, **values)


def test_a_manifest_without_edits_is_one_sentence(world):
    with pytest.raises(UserError, match=r"has 0 \.jsonl files beside it, not one; give the manifest of a data/edits job"):
        crispedit.main(job(world, "world-none", edits=world.tokenizer))


def test_the_model_is_left_on_the_grid_of_its_dtype(world):
    one = job(world, "world-half", dtype="bfloat16", epochs=5)
    crispedit.main(one)
    assert models.read(one.folder / "model", "bfloat16").model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert manifest.read(one.output).metrics["edit/moved"].value > 0
