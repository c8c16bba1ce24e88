"""Log-probabilities and entropy against float64."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from posttrain.core.logprobs import entropy, token_logprobs


def brute(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """One row at a time, in Python floats."""
    flat, out = (logits.double() / temperature).reshape(-1, logits.shape[-1]).tolist(), []
    for row, token in zip(flat, tokens.reshape(-1).tolist(), strict=True):
        top = max(row)
        out.append(row[token] - top - math.log(math.fsum(math.exp(v - top) for v in row)))
    return torch.tensor(out, dtype=torch.float64).view(tokens.shape)


def draw(*shape: int, vocabulary: int = 50, scale: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, vocabulary, generator=generator) * scale, torch.randint(vocabulary, shape, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 3)])
def test_against_brute_force(shape, temperature):
    logits, tokens = draw(*shape)
    found = token_logprobs(logits, tokens, temperature=temperature)
    assert found.shape == tokens.shape and found.dtype == torch.float32
    assert torch.allclose(found.double(), brute(logits, tokens, temperature), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_float32(dtype):
    logits, tokens = draw(200, vocabulary=2000)
    logits = logits.to(dtype)
    found = token_logprobs(logits, tokens)
    assert found.dtype == torch.float32 and (found.double() - brute(logits, tokens)).abs().max() < 1e-4
    low = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (low.double() - brute(logits, tokens)).abs().max() > 1e-3  # what the cast avoids


@pytest.mark.parametrize("chunk", [1, 4, 7, 12, 13])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_value_nor_gradient(chunk, temperature):
    logits, tokens = draw(3, 4)
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for size in (100, chunk):
        leaf = logits.clone().requires_grad_()
        value = token_logprobs(leaf, tokens, chunk=size, temperature=temperature)
        (value * weights).sum().backward()
        results.append((value.detach(), leaf.grad))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6) and torch.allclose(results[0][1], results[1][1], atol=1e-6)
    assert torch.allclose(token_logprobs(logits, tokens, chunk=chunk, temperature=temperature), results[0][0], atol=1e-6)


def test_no_float32_copy_of_all_rows_is_ever_made():
    """The promise of chunks: with a vocabulary of 150k the copy is what does not fit."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
            nonlocal largest
            made = function(*arguments, **(options or {}))
            if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                largest = max(largest, made.numel())
            return made

    logits, tokens = draw(64, vocabulary=100)
    logits = logits.bfloat16().requires_grad_()
    with Watch():
        token_logprobs(logits, tokens, chunk=8).sum().backward()
    assert largest == 800 and logits.grad.abs().sum() > 0


def test_gradient_is_one_hot_minus_softmax():
    logits, tokens = draw(5, vocabulary=9)
    leaf = logits.double().requires_grad_()
    token_logprobs(leaf, tokens).sum().backward()
    expected = torch.nn.functional.one_hot(tokens, 9) - logits.double().softmax(-1)
    assert torch.allclose(leaf.grad, expected, atol=1e-6)


def test_padded_vocabulary_columns_change_nothing():
    logits, tokens = draw(6)
    padded = torch.cat([logits, torch.full((6, 128), -torch.inf)], -1)
    assert torch.equal(token_logprobs(padded, tokens), token_logprobs(logits, tokens)) and torch.allclose(
        entropy(padded), entropy(logits)
    )


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e30, 0.0, 0.0]])
    assert token_logprobs(logits, torch.tensor([0, 1])).tolist() == pytest.approx([0.0, -math.log(2)])
    assert token_logprobs(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1])).item() == -math.inf


def test_probabilities_sum_to_one():
    logits, _ = draw(1)
    every = token_logprobs(logits.expand(50, 50), torch.arange(50))
    assert every.double().exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_entropy():
    logits, _ = draw(4, 3)
    expected = scipy_entropy(logits.double().softmax(-1).numpy(), axis=-1)
    assert torch.allclose(entropy(logits).double(), torch.from_numpy(expected), atol=1e-5)
    assert entropy(torch.zeros(8)).item() == pytest.approx(math.log(8))
    assert entropy(torch.tensor([0.0, -torch.inf, -torch.inf])).item() == 0.0
    assert entropy(torch.tensor([0.0, 0.0, -torch.inf])).item() == pytest.approx(math.log(2))
    assert entropy(torch.tensor([1e4, 0.0])).item() == 0.0 and entropy(logits.bfloat16()).dtype == torch.float32
