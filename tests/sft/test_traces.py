"""Traces: the behaviour log-probabilities are those of the policy that wrote the tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, models, tables
from posttrain.core.errors import UserError
from posttrain.data import verify
from posttrain.sft import traces


def job(world, folder: Path, **options) -> traces.Config:
    path = folder / "sft/traces/t/seed0/manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    defaults = {
        "source": "teacher",
        "train": 60,
        "validation": 20,
        "tokenizer": world.base,
        "task": world.task,
        "max_new_tokens": 12,
    }
    return traces.Config(output=path, **(defaults | options))


def test_policy_traces_have_known_probabilities(world):
    tokenizer = models.load_tokenizer(world.base)
    rows = tables.read(world.traces.parent / "traces.parquet")
    styles = [tokenizer.decode(row["response_ids"])[0] for row in rows]
    share = styles.count("b") / len(styles)
    assert abs(share - 0.8) < 4 * math.sqrt(0.16 / len(styles))
    for row, style in zip(rows, styles, strict=True):
        expected = [math.log(0.8 if style == "b" else 0.2)] + [0.0] * (len(row["response_ids"]) - 1)
        assert row["logp_beta"] == pytest.approx(expected)
        a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
        assert row["top_ids"][0] == [a, b] and row["top_logps"][0] == pytest.approx([math.log(0.2), math.log(0.8)])
        assert row["response_ids"][-1] == tokenizer.eos_token_id


def test_both_styles_answer_correctly(world):
    items = {row["prompt"]: row["answer"] for row in tables.read(world.task.parent / "items.parquet")}
    tokenizer = models.load_tokenizer(world.base)
    for row in tables.read(world.traces.parent / "traces.parquet"):
        prompt = tokenizer.decode(row["prompt_ids"])
        assert verify.correct(row["response"], items[prompt], "hash")


def test_teacher_scores_equal_a_float64_forward_pass(world, tmp_path):
    config = job(world, tmp_path, teacher=world.base, keep_wrong=True, top=3)
    traces.main(config)
    rows = tables.read(config.folder / "traces.parquet")
    model = models.load(world.base).double()
    for row in rows[:10]:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.inference_mode():
            logp = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        expected = logp.gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        assert row["logp_beta"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert row["top_logps"][0] == pytest.approx(logp[0].topk(3).values.tolist(), abs=1e-4)
    assert 0 < manifest.read(config.output).metrics["kept_share"].value <= 1


def test_wrong_traces_are_dropped_unless_asked_for(world, tmp_path):
    """The world's base answers almost nothing correctly, so nothing is kept and the sentence says what to do."""
    kept = job(world, tmp_path / "kept", teacher=world.base, keep_wrong=True)
    traces.main(kept)
    wrong = [row for row in tables.read(kept.folder / "traces.parquet") if not row["correct"]]
    assert wrong
    try:
        strict = job(world, tmp_path / "strict", teacher=world.base)
        traces.main(strict)
        assert all(row["correct"] for row in tables.read(strict.folder / "traces.parquet"))
    except UserError as error:
        assert "no trace was kept" in str(error)


def test_another_vocabulary_is_refused(world, tmp_path):
    from posttrain.base import scratch
    from posttrain.core.models import Shape
    from posttrain.data import mix, tokenizer

    def out(reference):
        path = tmp_path / reference / "seed0/manifest.json"
        path.parent.mkdir(parents=True)
        return path

    tok, mixed, other = out("data/tokenizer/x"), out("data/mix/x"), out("base/scratch/x")
    tokenizer.main(tokenizer.Config(output=tok, kind="characters", alphabet="ab#=9876543210"))
    parts = {"two_style": mix.Part(share=1.0, field="demonstration")}
    mix.main(
        mix.Config(output=mixed, tokens=2000, held_out_tokens=500, parts=parts, tokenizer=tok, sources={"two_style": world.task})
    )
    scratch.main(
        scratch.Config(
            output=other,
            shape=Shape(hidden=16, layers=1, heads=2, intermediate=32),
            length=32,
            steps=1,
            batch_size=4,
            mix=mixed,
            tokenizer=tok,
        )
    )
    with pytest.raises(UserError, match="different vocabularies; ratios between them are undefined"):
        traces.main(job(world, tmp_path / "t", teacher=other))


def test_hub_data_set_with_a_local_fake(world, tmp_path, monkeypatch):
    """Rows of a published data set are rendered, verified and scored by the generator; a missing column is named."""
    items = tables.read(world.task.parent / "items.parquet", None, [("split", "=", "train")])[:30]
    published = [{"problem": i["prompt"], "solution": i["demonstration"], "gold": i["answer"]} for i in items]
    published[4]["solution"] = "a00000#x"
    asked = {}

    def fake(repo, *, revision, split, streaming):
        asked.update(repo=repo, revision=revision, streaming=streaming)
        return iter(published)

    monkeypatch.setattr("datasets.load_dataset", fake)
    fields = {"prompt": "problem", "response": "solution", "answer": "gold"}
    options = {"source": "dataset", "teacher": world.base, "train": 20, "validation": 9, "repo": "o/d", "revision": "b" * 40}
    monkeypatch.setattr(
        traces.chat, "render", lambda t, p, r: (t(p)["input_ids"], [*t(r.replace("x", "0"))["input_ids"], t.eos_token_id])
    )
    config = job(world, tmp_path, fields=fields, **options)
    traces.main(config)
    rows = tables.read(config.folder / "traces.parquet")
    assert len(rows) == 29 and all(row["correct"] for row in rows) and asked["revision"] == "b" * 40 and asked["streaming"]
    with pytest.raises(UserError, match="o/d row 0 has no column 'response_text'; correct `fields`"):
        traces.main(job(world, tmp_path / "bad", fields=fields | {"response": "response_text"}, **options))
    with pytest.raises(UserError, match="needs repo and revision"):
        traces.main(job(world, tmp_path / "none", fields=fields, **(options | {"revision": None})))


def test_teacher_is_sampled_at_temperature_one(world, tmp_path, monkeypatch):
    """Log-probabilities at temperature 1 are those of the sampler only if it sampled at temperature 1, without truncation."""
    from posttrain.core import generation

    asked, real = [], generation.sample
    monkeypatch.setattr(generation, "sample", lambda *a, **k: (asked.append(k), real(*a, **k))[1])
    traces.main(job(world, tmp_path, teacher=world.base, keep_wrong=True))
    assert len(asked) == 2 and all(one.get("temperature", 1.0) == 1.0 and one["count"] == 1 for one in asked)
