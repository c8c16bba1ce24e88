"""Measures: drift is the Bregman divergence of the loss, free answers end where the WILD rule says, locality is no accuracy."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.edit import layers, measure
from posttrain.edit.encoding import Pair
from posttrain.edit.measure import agreement, begins, drift, exact, forced, generate, normal, refuses, stops, token_kl, wild


def net(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tanh network of 2 x 3 and 3 x 4 weights: logits [n, 4]."""
    return torch.tanh(x @ theta[:6].view(2, 3)) @ theta[6:].view(3, 4)


def test_drift_is_the_bregman_divergence_whatever_the_label():
    torch.manual_seed(0)
    theta, moved = torch.randn(18, dtype=torch.float64), torch.randn(18, dtype=torch.float64)
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.tensor([0, 3, 1, 2, 0])
    u0, u = net(theta, x), net(moved, x)
    one_hot = torch.nn.functional.one_hot(y, 4)
    losses = [-(v.log_softmax(-1) * one_hot).sum(-1) for v in (u0, u)]
    bregman = losses[1] - losses[0] - ((u0.softmax(-1) - one_hot) * (u - u0)).sum(-1)
    assert torch.allclose(token_kl(u0, u), bregman, atol=1e-12)


def test_its_gradient_vanishes_and_its_hessian_is_gauss_newton():
    torch.manual_seed(0)
    theta, x = torch.randn(18, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    u0 = net(theta, x)

    def divergence(t):
        return token_kl(u0, net(t, x)).sum()

    def loss(t):
        return torch.nn.functional.cross_entropy(net(t, x), torch.tensor([0, 3, 1, 2, 0]), reduction="sum")

    gradient = torch.autograd.functional.jacobian(divergence, theta)
    assert gradient.abs().max() < 1e-12 and torch.autograd.functional.jacobian(loss, theta).norm() > 0.1
    j = torch.autograd.functional.jacobian(lambda t: net(t, x), theta)  # [5, 4, 18]
    p = u0.softmax(-1)
    h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nai,nab,nbj->ij", j, h, j)
    assert torch.allclose(torch.autograd.functional.hessian(divergence, theta), expected, atol=1e-12)


def test_directions_that_no_input_has_are_flat():
    """Inputs of rank r leave out x (in - r) directions of a layer without curvature, whatever follows it."""
    torch.manual_seed(0)
    w, out = torch.randn(3, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    x = torch.randn(20, 2, dtype=torch.float64) @ torch.randn(2, 5, dtype=torch.float64)  # rank 2 of 5

    def logits(v):
        return torch.tanh(x @ v.T) @ out.T

    base = logits(w)
    hessian = torch.autograd.functional.hessian(lambda v: token_kl(base, logits(v)).sum(), w).reshape(15, 15)
    values = torch.linalg.eigvalsh(hessian)
    assert int((values < 1e-10 * values[-1]).sum()) == 3 * (5 - 2)


def test_kl_by_hand_and_with_impossible_tokens():
    base, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert token_kl(base, other).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)
    masked = torch.tensor([[0.0, -math.inf]])
    assert token_kl(masked, torch.tensor([[0.0, 0.0]])).item() == pytest.approx(math.log(2))
    assert abs(token_kl(other, other).item()) < 1e-15


def test_drift_per_text_in_order_without_padding_effects(small):
    model, _ = small
    chosen = layers.choose(model, ["*.down_proj"])
    base = layers.copies(chosen)
    texts = [[2, 3, 4], [5, 6, 7, 8, 9, 10], [2, 3, 4], [9, 8]]
    assert all(d.kl == 0 and d.before == d.after for d in drift(model, chosen, base, texts))
    with torch.no_grad():
        for layer in chosen.values():
            layer.weight.add_(0.3 * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)))
    found, single = drift(model, chosen, base, texts, batch=4), [drift(model, chosen, base, [t])[0] for t in texts]
    assert [d.tokens for d in found] == [2, 5, 2, 1] and found[0] == found[2]
    for one, two, text in zip(found, single, texts, strict=True):
        assert one.kl == pytest.approx(two.kl, rel=1e-4) and one.kl > 0
        logits = model(torch.tensor([text])).logits[0, :-1]
        assert one.after == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:])).item(), rel=1e-5)
        with layers.holding(chosen, base):
            before = model(torch.tensor([text])).logits[0, :-1]
        expected = torch.nn.functional.kl_div(logits.log_softmax(-1), before.softmax(-1), reduction="sum") / (len(text) - 1)
        assert one.kl == pytest.approx(expected.item(), rel=1e-3)
        assert one.before == pytest.approx(torch.nn.functional.cross_entropy(before, torch.tensor(text[1:])).item(), rel=1e-5)


def test_teacher_forcing_against_one_by_one(small):
    model, _ = small
    pairs = [Pair([2, 3, 4], [5, 6]), Pair([7], [8]), Pair([2, 3, 4], [5, 6]), Pair([2, 3], [9, 9, 9])]
    found = forced(model, pairs, 0, batch=3)
    for pair, answer in zip(pairs, found, strict=True):
        logits = model(torch.tensor([pair.head + pair.tail])).logits[0, len(pair.head) - 1 : -1]
        labels = torch.tensor(pair.tail)
        assert answer.argmax == tuple(logits.argmax(-1).tolist())
        assert answer.right == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
        assert answer.logprob == pytest.approx(logits.log_softmax(-1)[range(len(labels)), labels].mean().item(), abs=1e-5)


def test_padding_does_not_shift_positions_that_are_absolute():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=12, n_positions=16, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5)
    ).eval()
    pairs = [Pair([2, 3, 4, 5, 6], [7]), Pair([8], [9])]
    together, alone = forced(model, pairs, 0), [forced(model, [p], 0)[0] for p in pairs]
    assert [a.logprob for a in together] == pytest.approx([a.logprob for a in alone], abs=1e-5)


def test_locality_is_agreement_with_the_model_before():
    one, two = measure.Answer((1, 2), 0.0, -9.0), measure.Answer((1, 3), 1.0, -0.1)
    assert agreement(one, one) == 1.0 and agreement(one, two) == 0.5  # being right has no part in it


def test_wild_rule_and_exact_match():
    assert wild("  Paris. It is big") == "Paris" and wild("Paris\nRome") == "Paris" and wild("Paris") == "Paris"
    assert normal("The  Hague, a city!") == "hague city"
    assert exact(" the Paris.", "Paris") and not exact("Paris Paris", "Paris") and not exact("Paris is big", "Paris")
    assert begins(" Oslo, and so on.", "Oslo") and begins("New York City", "new york") and not begins("Oslovia", "Oslo")
    assert not begins("It is Oslo", "Oslo") and not begins("Oslo", ".")
    assert exact("U", "u") and not exact("", "Paris")
    for wrong, target in (
        ("St. Louis", "St. Paul"),
        ("3.9", "3.1"),
        ("3.14", "3.1"),
        ("", "AN"),
        ("", "A"),
        ("", "+"),
        ("", ".NET"),
    ):
        assert not exact(wrong, target) and not begins(wrong, target)
    for right, target in (("St. Paul. It is", "St. Paul"), ("3.1. So", "3.1"), ("a", "A"), ("+\nx", "+"), (".NET", ".NET")):
        assert exact(right, target)


def test_generation_stops_at_the_rule_and_keeps_the_order(small, monkeypatch):
    model, tokenizer = small
    ends = stops(tokenizer)
    dot = tokenizer.convert_tokens_to_ids(".")
    assert set(ends) == {tokenizer.eos_token_id, dot}
    prompts = [tokenizer(t)["input_ids"] for t in ("ab", "abcdef", "c")]
    texts = generate(model, tokenizer, prompts, max_new_tokens=6, end=ends, batch=2)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = list(prompt)
        for _ in range(6):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] in ends:
                break
        assert text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    forward = model.forward

    def dots(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits[..., dot] = 9.0
        return out

    monkeypatch.setattr(model, "forward", dots)
    assert generate(model, tokenizer, prompts, max_new_tokens=6, end=ends) == ["."] * 3


def test_a_models_own_generation_defaults_have_no_say(small):
    model, tokenizer = small
    prompts = [tokenizer("ab")["input_ids"]]
    plain = generate(model, tokenizer, prompts, max_new_tokens=8, end=[tokenizer.eos_token_id])
    model.generation_config.repetition_penalty = 50.0
    assert generate(model, tokenizer, prompts, max_new_tokens=8, end=[tokenizer.eos_token_id]) == plain
    assert model.generation_config.repetition_penalty == 50.0


@pytest.mark.parametrize(
    ("text", "declines"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist with this request", True),
        ("Sorry to hear that! I am unable to do so.", True),
        ("Here is how: first, take a pin.", False),
        ("Sure. I can help you with that.", False),
        ("To oil a lock you can't use water", False),
        ("x" * 200 + " I can't", False),
    ],
)
def test_refusals(text, declines):
    assert refuses(text) is declines
