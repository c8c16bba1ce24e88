"""Sampling: the model's own distribution, whatever batch a prompt stands in."""

from __future__ import annotations

import pytest
import torch

from posttrain.core import models
from posttrain.core.generation import sample
from posttrain.data.tokenizer import characters, wrap


@pytest.fixture(scope="module")
def tokenizer():
    return wrap(characters("0123456789=ab#"))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    found = models.scratch(models.Shape(hidden=32, layers=2, heads=2, intermediate=32, context=64), tokenizer)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(6 if p.ndim > 1 else 1)  # decided opinions, so that greedy choices have no ties
    return found.eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer(text)["input_ids"] for text in ("12345=", "9=", "77=", "1=", "000111222=")]


def greedy(model, prompt: list[int], eos: int, length: int) -> list[int]:
    """One token at a time, without cache, padding or batch."""
    ids: list[int] = []
    while len(ids) < length and ids[-1:] != [eos]:
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def test_greedy_is_the_argmax_of_each_prompt_alone(model, tokenizer, prompts):
    expected = [greedy(model, p, tokenizer.eos_token_id, 12) for p in prompts]
    for batch in (1, 2, 100):
        found = sample(model, tokenizer, prompts, count=1, max_new_tokens=12, seed=0, temperature=0, batch=batch)
        assert [one.ids for (one,) in found] == expected
    for ids, (one,) in zip(expected, found, strict=True):
        assert one.finished == (ids[-1] == tokenizer.eos_token_id)
        assert one.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_counts_order_and_ends(model, tokenizer, prompts):
    found = sample(model, tokenizer, prompts, count=40, max_new_tokens=12, seed=1, batch=64)
    assert [len(row) for row in found] == [40] * 5
    eos, every = tokenizer.eos_token_id, [one for row in found for one in row]
    assert {one.finished for one in every} == {True, False}
    for one in every:
        assert 1 <= len(one.ids) <= 12 and one.finished == (one.ids[-1] == eos) and eos not in one.ids[:-1]
        assert one.finished or len(one.ids) == 12
        assert "<" not in one.text


def test_same_seed_same_samples(model, tokenizer, prompts):
    options = {"count": 4, "max_new_tokens": 8}
    one = sample(model, tokenizer, prompts, seed=3, **options)
    torch.rand(5)
    assert one == sample(model, tokenizer, prompts, seed=3, **options) != sample(model, tokenizer, prompts, seed=4, **options)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_first_tokens_follow_the_models_distribution(model, tokenizer, prompts, temperature):
    """No top-k, no top-p. 6000 draws: a share's standard error is at most 0.0065."""
    (found,) = sample(model, tokenizer, prompts[:1], count=6000, max_new_tokens=1, seed=5, temperature=temperature, batch=6000)
    counts = torch.bincount(torch.tensor([one.ids[0] for one in found]), minlength=len(tokenizer)) / 6000
    with torch.inference_mode():
        expected = (model(torch.tensor([prompts[0]])).logits[0, -1] / temperature).softmax(-1)
    assert (counts - expected).abs().max() < 0.03 and expected.max() < 0.9


def test_no_token_of_a_large_vocabulary_is_cut_off():
    """transformers' own default would be top-k 50."""
    tokenizer = wrap(characters("".join(map(chr, range(0x4E00, 0x4E00 + 200)))))
    torch.manual_seed(0)
    flat = models.scratch(models.Shape(hidden=16, layers=1, heads=2, intermediate=16, context=8), tokenizer)
    (found,) = sample(flat, tokenizer, [[5]], count=4000, max_new_tokens=1, seed=0, batch=4000)
    assert len({one.ids[0] for one in found}) == 202


@pytest.mark.parametrize(
    "habit",
    [
        {"repetition_penalty": 9.0},
        {"min_p": 0.9},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": [3, 4, 5]},
        {"top_k": 1},
        {"eos_token_id": 5},
        {"max_length": 3},
        {"num_beams": 2},
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_habits_that_a_hub_model_brings_along_take_no_part(model, tokenizer, prompts, habit, temperature):
    options = {"count": 1, "max_new_tokens": 8, "seed": 6, "temperature": temperature}
    expected = sample(model, tokenizer, prompts, **options)
    own = model.generation_config
    try:
        model.generation_config = type(own)(**{**own.to_dict(), **habit})
        changed = model.generation_config
        assert sample(model, tokenizer, prompts, **options) == expected
        assert model.generation_config is changed
    finally:
        model.generation_config = own


def test_pad_that_is_eos(model, tokenizer, prompts):
    expected = sample(model, tokenizer, prompts, count=1, max_new_tokens=12, seed=0, temperature=0)
    other = wrap(characters("0123456789=ab#"))
    other.pad_token = other.eos_token
    assert sample(model, other, prompts, count=1, max_new_tokens=12, seed=0, temperature=0) == expected
    other.pad_token = None
    assert sample(model, other, prompts, count=1, max_new_tokens=12, seed=0, temperature=0) == expected
