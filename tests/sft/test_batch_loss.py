"""The whole loss of a batch against a loop over its rows, written from the card alone: own slicing, own weights, float64."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, models, tables
from posttrain.sft import train

GAMMA, BLOCK, CLIP_DELTA, CLIP_LOG = 0.9, 3, (-0.7, 0.4), (-1.2, 0.8)
WEIGHTINGS = ("sft", "dft", "token_is", "pear_token", "pear_block", "pear_sequence")


@pytest.fixture(scope="module")
def rows(world) -> list[dict]:
    """Eight traces of different lengths whose stored log-probabilities differ at every position; two are wrong."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i, row in enumerate(tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")])[:8]):
        n = 2 + (i * 3) % 8
        top = torch.rand(n, 3, generator=generator).add(0.1)
        top = (top / top.sum(1, keepdim=True) * 0.8).log()  # a fifth of the mass is in the tail
        found.append(
            {
                "prompt_ids": row["prompt_ids"][i % 3 :],
                "response_ids": row["response_ids"][:n],
                "logp_beta": (-2 * torch.rand(n, generator=generator)).tolist(),
                "top_ids": [torch.randperm(16, generator=generator)[:3].tolist() for _ in range(n)],
                "top_logps": top.tolist(),
                "correct": i not in (2, 5),
            }
        )
    return found


def weight(weighting: str, theta: list[float], beta: list[float]) -> list[float]:
    """The card's weights of one response, by its equations."""
    delta = [min(max(a - b, CLIP_DELTA[0]), CLIP_DELTA[1]) for a, b in zip(theta, beta, strict=True)]
    last = len(delta) - 1
    if weighting == "sft":
        return [1.0] * len(delta)
    if weighting == "dft":
        return [math.exp(a) for a in theta]
    if weighting == "token_is":
        return [math.exp(d) for d in delta]
    found = []
    for t in range(len(delta)):
        if weighting == "pear_sequence":
            log_g = sum(delta)
        else:
            end = t if weighting == "pear_token" else min(t - t % BLOCK + BLOCK - 1, last)
            log_g = (last - end) * math.log(GAMMA) + sum(delta[end + 1 :])
        found.append(math.exp(min(max(log_g, CLIP_LOG[0]), CLIP_LOG[1])))
    return found


def expected(model, rows, job, count: int) -> float:
    total = 0.0
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.inference_mode():
            logp = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(-1)
        at = [logp[len(prompt) + t - 1] for t in range(len(response))]  # what predicts response token t
        theta = [at[t][token].item() for t, token in enumerate(response)]
        w = weight(job.weighting, theta, row["logp_beta"])
        if job.norm == "self":
            w = [x * len(w) / sum(w) for x in w]
        if not row["correct"] and job.negative_strength:
            ratio = math.exp(sum(a - b for a, b in zip(theta, row["logp_beta"], strict=True)))
            w = [-job.negative_strength * min(max(ratio, 0.01), 2.0)] * len(w)
        if job.norm == "per_sequence":
            w = [x / len(w) for x in w]
        for t, x in enumerate(w):
            if job.loss == "nll":
                loss = -theta[t]
            else:
                p = [math.exp(v) for v in row["top_logps"][t]]
                q = [at[t][i].exp().item() for i in row["top_ids"][t]]
                loss = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                loss += (1 - sum(p)) * math.log((1 - sum(p)) / (1 - sum(q)))
            total += x * loss
    return total / count


CASES = [
    (w, loss, norm, 0.0) for w, loss, norm in itertools.product(WEIGHTINGS, ("nll", "kl"), ("tokens", "per_sequence", "self"))
]
CASES += [("pear_token", "nll", norm, 0.3) for norm in ("tokens", "per_sequence", "self")]


@pytest.mark.parametrize(("weighting", "loss", "norm", "strength"), CASES)
def test_batch_loss_equals_the_loop(world, rows, weighting, loss, norm, strength):
    job = train.Config(
        output=Path("results/t/sft/train/a-b/seed0/manifest.json"), start=world.base, traces=world.traces, batch_size=8,
        weighting=weighting, loss=loss, norm=norm, negative_strength=strength, gamma=GAMMA, block=BLOCK, clip_delta=CLIP_DELTA,
        clip_log=CLIP_LOG,
    )  # fmt: skip
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    batch = train.collate([train.example(row, 64) for row in rows], tokenizer.pad_token_id)
    count = len(rows) if norm == "per_sequence" else sum(len(row["response_ids"]) for row in rows)
    value, _ = train.batch_loss(model, batch, job, count)
    assert value.item() == pytest.approx(expected(model, rows, job, count), rel=2e-5)


def test_wrong_answers_become_less_likely_under_every_norm(world, rows):
    """One gradient step on wrong traces alone lowers their likelihood: a negative weight stays negative."""
    wrong = [{**row, "correct": False} for row in rows]
    tokenizer = models.load_tokenizer(world.base)
    data = [train.example(row, 64) for row in wrong]
    for norm in ("tokens", "per_sequence", "self"):
        job = train.Config(
            output=Path("results/t/sft/train/a-b/seed0/manifest.json"), start=world.base, traces=world.traces, norm=norm,
            negative_strength=0.3, weighting="pear_token",
        )  # fmt: skip
        model = models.load(world.base)
        before = sum(nll for nll, _ in train.nll_per_trace(model, data, tokenizer.pad_token_id))
        train.batch_loss(model, train.collate(data, tokenizer.pad_token_id), job, 50)[0].backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
        assert sum(nll for nll, _ in train.nll_per_trace(model, data, tokenizer.pad_token_id)) > before


def test_a_job_trains_on_what_it_says_and_validates_on_the_rest(world, tmp_path, monkeypatch):
    """Wrong traces are left out, validation holds the response alone of correct validation traces, drift is the L2 ratio."""
    import json

    stored = tables.read(world.traces.parent / "traces.parquet")
    for i, row in enumerate(stored):
        row["correct"] = i % 4 != 0
    path = tmp_path / "sft/traces/t/seed0/manifest.json"
    path.parent.mkdir(parents=True)
    file = tables.write(stored, path.parent / "traces.parquet")
    found = json.loads(world.traces.read_text())
    found["artifacts"] = {"traces.parquet": {"sha256": manifest.sha256(file), "size": file.stat().st_size}}
    path.write_text(json.dumps(found))
    output = tmp_path / "sft/train/a-b/seed0/manifest.json"
    output.parent.mkdir(parents=True)
    job = train.Config(output=output, start=world.base, traces=path, steps=3, batch_size=16, learning_rate=1e-3, warmup=0.0)
    seen, real = [], train.make_trainer
    monkeypatch.setattr(
        train, "make_trainer", lambda model, job, data, *rest: (seen.extend(data), real(model, job, data, *rest))[1]
    )
    train.main(job)
    kept = [row for row in stored if row["split"] == "train" and row["correct"]]
    assert [one["input_ids"].tolist() for one in seen] == [row["prompt_ids"] + row["response_ids"] for row in kept]

    model = models.load(output)
    held = [row for row in stored if row["split"] == "validation" and row["correct"]]
    rows = tables.read(output.parent / "validation.parquet")
    assert len(rows) == len(held) and len(held) < sum(row["split"] == "validation" for row in stored)
    for row, measured in list(zip(held, rows, strict=True))[:5]:
        with torch.inference_mode():
            logp = model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0].double().log_softmax(-1)
        start = len(row["prompt_ids"])
        nll = -sum(logp[start + t - 1, token].item() for t, token in enumerate(row["response_ids"]))
        assert measured["nll"] == pytest.approx(nll, rel=1e-5) and measured["tokens"] == len(row["response_ids"])
    before, after = models.load(world.base).state_dict(), model.state_dict()
    names = [name for name in before if name != "lm_head.weight"]  # tied: one tensor under two names
    moved = sum((after[n] - before[n]).double().square().sum() for n in names)
    ratio = (moved / sum(before[n].double().square().sum() for n in names)).sqrt().item()
    assert manifest.read(output).metrics["drift"].value == pytest.approx(ratio, rel=1e-6) and ratio > 0


def test_statistics_of_a_step_cover_all_its_micro_batches(world, rows, tmp_path):
    """With accumulation the logged mean weight is that of the whole batch, for micro-batches of equal token counts."""
    full = tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")])[:16]
    data = [train.example(row, 64) for row in full]
    means = []
    for accumulation in (1, 8):
        job = train.Config(
            output=tmp_path / str(accumulation) / "sft/train/a-b/seed0/manifest.json", start=world.base, traces=world.traces,
            weighting="pear_token", steps=1, batch_size=16, accumulation=accumulation,
        )  # fmt: skip
        trainer = train.make_trainer(models.load(world.base), job, data, 0, [])
        trainer.train()
        means.append(next(line["weight_mean"] for line in trainer.state.log_history if "weight_mean" in line))
    assert means[0] == pytest.approx(means[1], rel=1e-5)
