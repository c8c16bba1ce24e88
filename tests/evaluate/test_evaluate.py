"""Reasoning and retention evaluations on the small world."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core import generation, manifest, models, tables
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
