"""Reasoning and retention evaluations on the small world."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core import generation, manifest, models, tables
from posttrain.core.errors import UserError
from posttrain.evaluate import reasoning, retention


def output(tmp_path, method):
    path = tmp_path / "evaluate" / method / "a-b" / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True)
    return path


def test_reasoning_counts_agree_with_verified_responses(world, tmp_path, monkeypatch):
    """Responses are replaced by known ones: item i gets i % 5 right answers out of 4, capped."""
    items = tables.read(world.task.parent / "items.parquet", None, [("split", "=", "test")])[:20]

    def fake(model, tokenizer, prompts, *, count, **_):
        rows = []
        for i, item in enumerate(items):
            right = min(i % 5, count)
            good = generation.Sample([2, 1], f"a#{item['answer']}", True)
            bad = generation.Sample([2], f"a#{item['answer']}0", False)
            rows.append([good] * right + [bad] * (count - right))
        return rows

    monkeypatch.setattr(generation, "sample", fake)
    job = reasoning.Config(output=output(tmp_path, "reasoning"), items=20, samples=4, k=(1, 4), model=world.base, task=world.task)
    reasoning.main(job)
    found = manifest.read(job.output).metrics
    correct = [min(i % 5, 4) for i in range(20)]
    assert found["pass@1"].value == pytest.approx(sum(correct) / 80) and found["pass@1"].n == 20
    assert found["pass@4"].value == pytest.approx(sum(c > 0 for c in correct) / 20)
    assert found["finished"].value == pytest.approx(sum(correct) / 80)
    assert [row["correct"] for row in tables.read(job.folder / "items.parquet")] == correct


def test_reasoning_is_deterministic_and_uses_the_test_split(world, tmp_path):
    outs = []
    for name in ("one", "two"):
        job = reasoning.Config(
            output=output(tmp_path / name, "reasoning"), items=16, samples=8, max_new_tokens=10, model=world.base, task=world.task
        )
        reasoning.main(job)
        outs.append(job.output.read_bytes())
    assert outs[0] == outs[1]
    assert all(row["id"].startswith("test-") for row in tables.read(job.folder / "items.parquet"))


def test_k_above_samples_is_refused(world, tmp_path):
    with pytest.raises(ValueError, match="needs at least 8 samples, samples is 4"):
        reasoning.Config(output=output(tmp_path, "reasoning"), samples=4, k=(1, 8), model=world.base, task=world.task)


def test_sampling_follows_the_model_distribution(world):
    """Frequencies of the first sampled token agree with the softmax of the model's logits (no truncation)."""
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    prompt = tokenizer("12345=")["input_ids"]
    ((*drawn,),) = generation.sample(model, tokenizer, [prompt], count=6000, max_new_tokens=1, seed=3, batch=6000)
    counts = torch.bincount(torch.tensor([one.ids[0] for one in drawn]), minlength=len(tokenizer)) / 6000
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert (counts - expected).abs().max() < 4 * math.sqrt(0.25 / 6000)


def test_greedy_generation_does_not_depend_on_padding(world):
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    prompts = [tokenizer(text)["input_ids"] for text in ("12345=", "1=", "123=")]
    together = generation.sample(model, tokenizer, prompts, count=1, max_new_tokens=8, seed=0, temperature=0)
    for prompt, rows in zip(prompts, together, strict=True):
        assert generation.sample(model, tokenizer, [prompt], count=1, max_new_tokens=8, seed=0, temperature=0)[0] == rows


def test_retention_equals_brute_force(world, tmp_path):
    corpus = tmp_path / "data/corpus/prose/seed0/manifest.json"
    corpus.parent.mkdir(parents=True)
    texts = ["12345=a13605#5", "99=", "0123456789" * 3]
    rows = [{"id": str(i), "source": "s", "text": t, "split": "test"} for i, t in enumerate(texts)]
    file = tables.write(rows, corpus.parent / "documents.parquet")
    from posttrain.data.tokenizer import Config

    manifest.publish(Config(output=corpus, kind="characters", alphabet="a"), {}, [file])
    job = retention.Config(output=output(tmp_path, "retention"), documents=3, tokens=20, batch=2, model=world.base, corpus=corpus)
    retention.main(job)
    model, tokenizer = models.load(world.base).double(), models.load_tokenizer(world.base)
    losses, bits = [], []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"][:20]])
        with torch.inference_mode():
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum().item()
        losses.append(-logp / (ids.shape[1] - 1))
        bits.append(-logp / math.log(2) / (ids.shape[1] - 1))  # one byte per character
    found = manifest.read(job.output).metrics
    assert found["loss"].value == pytest.approx(sum(losses) / 3, rel=1e-4)
    assert found["bits_per_byte"].value == pytest.approx(sum(bits) / 3, rel=1e-4)


# --- families, the format gate, long range, facts --------------------------------------------------------------


def evaluated(prism, tmp_path, **options) -> reasoning.Config:
    defaults = {"items": 18, "samples": 4, "k": (1,), "max_new_tokens": 8, "answer_style": "think", "model": prism.mid}
    job = reasoning.Config(output=output(tmp_path, "reasoning"), task=prism.task, **(defaults | options))
    reasoning.main(job)
    return job


def test_without_the_gate_no_item_has_fewer_right_answers(prism, tmp_path, monkeypatch):
    """Responses are replaced: of 4 to item i, i % 5 are right in the form, and some more are right outside it."""
    items = tables.read(prism.task.parent / "items.parquet", None, [("split", "=", "test")])[:18]

    def fake(model, tokenizer, prompts, *, count, **_):
        found = []
        for i, item in enumerate(items):
            texts = [f"<think>1</think>{item['answer']}"] * (i % 5) + [f" {item['answer']}"] * (i % 3) + ["<think>1</think>x"] * 4
            found.append([generation.Sample([2, 1], text, True) for text in texts[:count]])
        return found

    monkeypatch.setattr(generation, "sample", fake)
    job = evaluated(prism, tmp_path)
    rows, found = tables.read(job.folder / "items.parquet"), manifest.read(job.output).metrics
    assert [row["correct"] for row in rows] == [i % 5 for i in range(18)]
    assert [row["correct_ungated"] for row in rows] == [min(4, i % 5 + i % 3) for i in range(18)]
    assert found["pass@1"].value == pytest.approx(sum(i % 5 for i in range(18)) / 72)
    assert found["ungated"].value == pytest.approx(sum(min(4, i % 5 + i % 3) for i in range(18)) / 72)
    assert found["ungated"].value > found["pass@1"].value


def test_the_gate_of_real_responses(prism, tmp_path):
    """The mid-trained model thinks; the base answers now and then, but never in the form."""
    mid, base = evaluated(prism, tmp_path / "mid"), evaluated(prism, tmp_path / "base", model=prism.base, samples=64)
    for job in (mid, base):
        rows = tables.read(job.folder / "items.parquet")
        assert all(row["correct"] <= row["correct_ungated"] for row in rows)
    found = {name: manifest.read(job.output).metrics for name, job in (("mid", mid), ("base", base))}
    assert found["mid"]["pass@1"].value > 0 == found["base"]["pass@1"].value
    assert any(row["first_response"].startswith("<think>") for row in tables.read(mid.folder / "items.parquet"))


def test_styles_without_a_gate_have_no_ungated_metric(world, tmp_path):
    job = reasoning.Config(output=output(tmp_path, "reasoning"), items=4, samples=2, k=(1,), model=world.base, task=world.task)
    reasoning.main(job)
    assert "ungated" not in manifest.read(job.output).metrics
    assert all(row["correct"] == row["correct_ungated"] for row in tables.read(job.folder / "items.parquet"))


def test_equal_numbers_of_items_of_the_families_that_are_named(prism, tmp_path):
    job = evaluated(prism, tmp_path, families=["science", "math"], items=8)
    rows, found = tables.read(job.folder / "items.parquet"), manifest.read(job.output).metrics
    assert [row["family"] for row in rows] == ["science"] * 4 + ["math"] * 4
    assert all(row["id"].split("-")[1] == "test" for row in rows)
    for family in ("science", "math"):
        part = [row["correct"] / row["n"] for row in rows if row["family"] == family]
        assert found[f"pass@1/{family}"].value == pytest.approx(sum(part) / 4) and found[f"pass@1/{family}"].n == 4
    assert found["pass@1"].value == pytest.approx((found["pass@1/science"].value + found["pass@1/math"].value) / 2)
    assert "pass@1/code" not in found
    few = evaluated(prism, tmp_path / "few", families=["science", "math"], items=100)  # nothing is evaluated twice
    assert (
        len({row["id"] for row in tables.read(few.folder / "items.parquet")})
        == 4 + 6
        == manifest.read(few.output).metrics["pass@1"].n
    )


LONG = ["0123456789=ab#" * 3, "12345=a13605#5", "9" * 20, "98=", "31415=a34803#3" * 2, "1" * 21]


@pytest.mark.parametrize("skip", [0, 1, 2, 14, 20])
@pytest.mark.parametrize("batch", [2, 32])
def test_skip_scores_exactly_the_tokens_from_there_on(world, tmp_path, skip, batch):
    from tests.checkpoints import corpus

    job = retention.Config(
        output=output(tmp_path, "retention"),
        documents=6,
        tokens=24,
        skip=skip,
        batch=batch,
        model=world.base,
        corpus=corpus(tmp_path, LONG),
    )
    retention.main(job)
    model, tokenizer = models.load(world.base).double(), models.load_tokenizer(world.base)
    expected = {}
    for i, text in enumerate(LONG):
        ids = tokenizer(text)["input_ids"][:24]
        if skip and len(text) <= skip:
            continue
        with torch.inference_mode():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scored = range(max(1, skip), len(ids))  # token t is predicted at t - 1
        expected[str(i)] = (-sum(logp[t - 1, ids[t]].item() for t in scored), len(scored))
    rows = {row["id"]: (row["nll"], row["tokens"]) for row in tables.read(job.folder / "documents.parquet")}
    assert rows.keys() == expected.keys()
    for name, (nll, tokens) in expected.items():
        assert rows[name] == (pytest.approx(nll, rel=1e-4), tokens)
    found = manifest.read(job.output).metrics
    assert found["loss"].value == pytest.approx(sum(n / t for n, t in expected.values()) / len(expected), rel=1e-4)
    assert found["loss"].n == len(expected) and "fact_recall" not in found


def test_short_documents_make_room_for_long_ones(world, tmp_path):
    from tests.checkpoints import corpus

    where = corpus(tmp_path, LONG)
    job = retention.Config(output=output(tmp_path, "retention"), documents=2, tokens=24, skip=20, model=world.base, corpus=where)
    retention.main(job)
    assert [row["id"] for row in tables.read(job.folder / "documents.parquet")] == ["0", "4"]


def test_a_skip_that_leaves_nothing_is_one_sentence(world, tmp_path):
    from tests.checkpoints import corpus

    where = corpus(tmp_path, LONG)
    for skip, tokens in ((100, 200), (24, 24)):
        options = {"documents": 2, "tokens": tokens, "skip": skip, "model": world.base, "corpus": where}
        job = retention.Config(output=output(tmp_path / str(skip), "retention"), **options)
        with pytest.raises(UserError, match=rf"^no test document of .* has more than skip = {skip} tokens; lower skip or raise"):
            retention.main(job)
        assert not job.output.exists()


def test_recall_of_facts_stands_beside_the_loss(prism, tmp_path):
    from posttrain.data.packed import recall

    found = {}
    for name, model in (("base", prism.base), ("mid", prism.mid)):
        job = retention.Config(
            output=output(tmp_path / name, "retention"),
            documents=8,
            tokens=32,
            model=model,
            corpus=prism.corpus,
            facts=prism.facts,
        )
        retention.main(job)
        table, questions = tables.read(job.folder / "facts.parquet"), tables.read(prism.facts.parent / "items.parquet")
        expected = recall(models.load(model), models.load_tokenizer(model), questions)
        assert [row["recalled"] for row in table] == expected
        assert [(row["id"], row["hop"]) for row in table] == [(q["id"], q["hop"]) for q in questions]
        found[name] = manifest.read(job.output)
        assert found[name].metrics["fact_recall"].n == 24 and found[name].metrics["loss"].n == 8
        assert found[name].metrics["fact_recall"].value == pytest.approx(sum(expected) / 24)
        assert "facts.parquet" in found[name].artifacts and "facts" in found[name].inputs
    assert found["mid"].metrics["fact_recall"].value > 0
