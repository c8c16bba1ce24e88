"""Editors: only the chosen layers change, fine-tuning is the plain loop, stopping, refreshes, sequential merging, closed form."""

from __future__ import annotations

import random

import pytest
import torch

from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.edit import editors, kfac, layers, least_squares
from posttrain.edit.editors import Settings, edit
from posttrain.edit.edits import Edit, Row
from posttrain.edit.encoding import edit_loss, encode
from posttrain.edit.projector import projectors

WORDS = [("ab", "x"), ("cd", "y"), ("ef", "z"), ("gh", "w"), ("ij", "v"), ("kl", "u")]
ROWS = [Row(Edit(id=s, subject=s, prompt=f"{s} is", target=t), f"e:{i}") for i, (s, t) in enumerate(WORDS)]
DOWN = ("*.down_proj",)
FAST = {"learning_rate": 0.02, "epochs": 60, "batch": 4, "layers": DOWN}


@pytest.fixture
def texts(small):
    """Token sequences that stand for capability text."""
    rng = random.Random(0)
    return [[rng.randrange(2, 30) for _ in range(rng.randrange(5, 12))] for _ in range(12)]


def state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "more",
    [
        {"projection": "none"},
        {"projection": "grad", "gamma": 0.5},
        {"projection": "step", "gamma": 0.5},
        {"projection": "step", "gamma": 0.5, "subspace": "a_only"},
        {"projection": "grad", "gamma": 0.5, "subspace": "random"},
        {"projection": "grad", "gamma": 0.5, "chunk": 3},
        {"projection": "grad", "gamma": 0.5, "chunk": 3, "sequential": "mix"},
        {"editor": "lora", "lora_rank": 4},
        {"editor": "least_squares", "solve_at": "last", "solve_weight": 0.01, "solve_reach": 300},
        {
            "editor": "least_squares",
            "solve": "null_space",
            "gamma": 0.1,
            "solve_at": "last",
            "solve_weight": 1e-6,
            "solve_reach": 300,
        },
    ],
    ids=lambda m: "-".join(map(str, m.values())),
)
def test_every_editor_lowers_the_loss_and_touches_the_chosen_layers_alone(small, texts, more):
    model, tokenizer = small
    more = {"leading_space": False, **more}  # one token: a closed form has one position per edit
    before, pairs = state(model), encode(tokenizer, ROWS, Settings(**more).style)
    chosen = list(layers.choose(model, DOWN))
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    first = edit_loss(model, pairs, 0).item()
    stats = edit(model, tokenizer, ROWS, Settings(**FAST | more), texts=texts, seed=1)
    assert edit_loss(model, pairs, 0).item() < 0.7 * first
    touched = {f"{name}.weight" for name in (chosen[-1:] if more.get("editor") == "least_squares" else chosen)}
    assert {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])} == touched
    assert stats.steps > 0 and stats.losses and not hasattr(model, "peft_config")
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"model.layers.0.mlp.up_proj.weight"}
    assert all(p.grad is None for p in model.parameters())


def test_fine_tuning_is_the_plain_loop_bit_for_bit(small):
    model, tokenizer = small
    settings = Settings(projection="none", **FAST | {"epochs": 3})
    pairs, twin = encode(tokenizer, ROWS, settings.style), type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    edit(model, tokenizer, ROWS, settings, seed=5)
    twin.requires_grad_(False)  # on some processors it changes rounding which gradients are computed together
    weights = [layer.weight.requires_grad_(True) for layer in layers.choose(twin, DOWN).values()]
    optimizer = torch.optim.Adam(weights, lr=0.02)
    order, shuffle = list(range(6)), random.Random(derive(5, "edits", 0))
    for _ in range(3):
        shuffle.shuffle(order)
        for part in (order[:4], order[4:]):
            optimizer.zero_grad()
            edit_loss(twin, [pairs[i] for i in part], 0).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_loss_is_that_of_the_target_tokens_alone(small):
    model, tokenizer = small
    pairs = encode(tokenizer, [ROWS[0], Row(Edit(subject="a", prompt="a", target="bcd"), "")], Settings().style)
    total, count = 0.0, 0
    for head, tail in pairs:
        logits = model(torch.tensor([head + tail])).logits[0].log_softmax(-1)
        for i, token in enumerate(tail):
            total, count = total - logits[len(head) + i - 1, token].item(), count + 1
    assert edit_loss(model, pairs, 0).item() == pytest.approx(total / count, abs=1e-5) and count == 2 + 4


def test_stopping_and_skipping(small):
    model, tokenizer = small
    rule = {"epochs": 500, "batch": 2, "learning_rate": 0.005}
    stats = edit(model, tokenizer, ROWS, Settings(projection="none", **FAST | rule | {"stop_below": 0.3}), seed=0)
    assert stats.epochs < 500 and stats.loss < 0.3 <= stats.losses[-2] and len(stats.losses) == stats.epochs
    more = edit(model, tokenizer, ROWS, Settings(projection="none", **FAST | rule | {"epochs": 20, "skip_below": 0.2}), seed=0)
    assert more.skipped > 0 and more.steps > 0 and more.steps + more.skipped == 3 * more.epochs
    again = edit(model, tokenizer, ROWS, Settings(projection="none", **FAST | {"skip_below": 100, "stop_below": 100}), seed=0)
    assert again.steps == 0 and again.epochs == 1  # the first epoch finds nothing left to do


def test_the_loss_that_is_reported_is_of_all_edits_at_the_end(small):
    """Not of the last chunk: it may have undone the ones before."""
    model, tokenizer = small
    pairs = encode(tokenizer, ROWS, Settings().style)
    stats = edit(model, tokenizer, ROWS, Settings(projection="none", **FAST | {"epochs": 30, "chunk": 2, "batch": 2}), seed=0)
    expected = sum(edit_loss(model, [pair], 0).item() for pair in pairs) / len(pairs)
    assert stats.loss == pytest.approx(expected, rel=1e-3) and abs(stats.loss - stats.losses[-1]) > 1e-3


def test_the_same_seed_gives_the_same_weights(small, texts):
    results = []
    for seed in (1, 1, 2):
        model, tokenizer = small
        twin = type(model)(model.config)
        twin.load_state_dict(model.state_dict())
        edit(twin, tokenizer, ROWS, Settings(gamma=0.5, **FAST | {"epochs": 3}), texts=texts, seed=seed)
        results.append(twin.model.layers[1].mlp.down_proj.weight.detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_step_mode_keeps_the_whole_edit_in_the_subspace(small, texts):
    model, tokenizer = small
    chosen = layers.choose(model, DOWN)
    before = layers.copies(chosen)
    project, free = projectors(kfac.accumulate(model, chosen, texts), 0.8)
    stats = edit(model, tokenizer, ROWS, Settings(projection="step", gamma=0.8, refresh=None, **FAST), texts=texts)
    for name, layer in chosen.items():
        moved = layer.weight.detach() - before[name]
        assert moved.norm() > 0.01 and (moved - project[name](moved)).abs().max() < 1e-6
    assert stats.free == free


def test_factors_that_are_given_are_used_and_need_no_text(small, texts):
    model, tokenizer = small
    chosen = layers.choose(model, DOWN)
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    found = kfac.accumulate(model, chosen, texts)
    settings = Settings(gamma=0.5, refresh=None, **FAST | {"epochs": 3})
    edit(model, tokenizer, ROWS, settings, factors=found)
    edit(twin, tokenizer, ROWS, settings, texts=texts)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(UserError, match="needs capability text"):
        edit(model, tokenizer, ROWS, settings)


def test_factors_are_refreshed_after_a_long_way(small, texts, monkeypatch):
    model, tokenizer = small
    seen = []
    original = editors.ProjectedOptimizer.refresh
    monkeypatch.setattr(editors.ProjectedOptimizer, "refresh", lambda self, p: seen.append(self.moved()) or original(self, p))
    stats = edit(model, tokenizer, ROWS, Settings(gamma=0.3, refresh=0.2, **FAST | {"learning_rate": 0.001}), texts=texts)
    assert stats.refreshes == len(seen) > 0 and all(0.2 < way < 0.3 for way in seen)
    model2, _ = small
    assert edit(model2, tokenizer, ROWS, Settings(gamma=0.3, refresh=None, **FAST), texts=texts).refreshes == 0


def test_sequential_editing_merges_the_factors_of_each_chunk_over_whole_sequences(small, texts, monkeypatch):
    model, tokenizer = small
    merged, computed = [], []
    accumulate, merge = kfac.accumulate, kfac.merge
    monkeypatch.setattr(
        editors.kfac, "accumulate", lambda *a, **k: computed.append([list(r) for r in a[2]]) or accumulate(*a, **k)
    )
    monkeypatch.setattr(editors.kfac, "merge", lambda a, b: merged.append((a.tokens, b.tokens)) or merge(a, b))
    more = FAST | {"epochs": 2, "refresh": None, "gamma": 0.5, "chunk": 2}
    settings = Settings(**more)
    edit(model, tokenizer, ROWS, settings, texts=texts)
    whole = [p.head + p.tail for p in encode(tokenizer, ROWS, settings.style)]
    assert computed == [texts, whole[:2], whole[2:4]]  # not for the last chunk: nothing follows it
    n = sum(len(t) - 1 for t in texts)
    sizes = [sum(len(r) - 1 for r in part) for part in (whole[:2], whole[2:4])]
    assert merged == [(n, sizes[0]), (n + sizes[0], sizes[1])]
    computed.clear()
    edit(model, tokenizer, ROWS, Settings(**more | {"refresh": 1e-9, "epochs": 1, "batch": 2}), texts=texts)  # after every step
    assert computed == [texts, texts, whole[:2], texts + whole[:2], whole[2:4], texts + whole[:4]]
    computed.clear()
    edit(model, tokenizer, ROWS, Settings(sequential="mix", **more), texts=texts)
    assert computed == [texts, texts + whole[:2], texts + whole[:4]]


def test_what_cannot_be_done_is_one_sentence(small, texts):
    model, tokenizer = small
    with pytest.raises(UserError, match="there are no edits to write"):
        edit(model, tokenizer, [], Settings(layers=DOWN), texts=texts)
    with pytest.raises(UserError, match=r"layers: '\*\.down' matches no linear layer"):
        edit(model, tokenizer, ROWS, Settings(layers=("*.down",)), texts=texts)
    for gamma in (-0.1, 1.5):
        with pytest.raises(ValueError, match="gamma"):
            Settings(gamma=gamma)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"the edits' loss is nan at step 0; lower learning_rate \(now 0\.02\)"):
        edit(model, tokenizer, ROWS, Settings(projection="none", **FAST))


# --- closed form ------------------------------------------------------------------------------------------------


def draws(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_covariance_update_solves_its_problem():
    keys, residuals, x = draws(0, 6, 3), draws(1, 4, 3), draws(2, 20, 6)
    c = x.T @ x / 20
    update = least_squares.covariance_update(keys, residuals, c, 0.5)

    def cost(d):
        return ((d @ keys - residuals) ** 2).sum() + 0.5 * torch.einsum("ij,jk,ik->", d, c, d)

    d = update.clone().requires_grad_(True)
    cost(d).backward()
    assert d.grad.abs().max() < 1e-5
    assert all(cost(update) < cost(update + 0.01 * draws(s, 4, 6)) for s in range(3, 8))
    exact = least_squares.covariance_update(keys, residuals, c, 1e-9)
    assert torch.allclose(exact @ keys, residuals, atol=1e-5)


def test_null_space_update_leaves_the_protected_directions_alone():
    keys, residuals = draws(0, 6, 3), draws(1, 4, 3)
    c = torch.diag(torch.tensor([5.0, 3.0, 1e-3, 1e-4, 0.0, 0.0], dtype=torch.float64))
    update = least_squares.null_space_update(keys, residuals, c, 0.9, 1e-9)
    assert update[:, :2].abs().max() < 1e-12 and torch.allclose(update @ keys, residuals, atol=1e-4)
    p = torch.diag(torch.tensor([0.0, 0, 1, 1, 1, 1], dtype=torch.float64))
    system = keys @ keys.T @ p + 0.3 * torch.eye(6, dtype=torch.float64)
    expected = residuals @ keys.T @ p @ torch.linalg.inv(system)
    assert torch.allclose(least_squares.null_space_update(keys, residuals, c, 0.9, 0.3), expected, atol=1e-9)


def test_keys_are_what_the_layer_reads_and_values_stay_within_reach(small):
    model, tokenizer = small
    pairs = encode(tokenizer, ROWS[:3], Settings().style)
    layer = model.model.layers[1].mlp.down_proj
    model.requires_grad_(False)
    keys, residuals, losses = least_squares.keys_and_residuals(model, layer, pairs, 0, None, steps=20, rate=0.1, reach=2.0)
    seen = {}
    handle = layer.register_forward_hook(lambda _m, i, o: seen.update(a=i[0], s=o))
    for n, pair in enumerate(pairs):
        model(torch.tensor([pair.head + pair.tail]))
        assert torch.allclose(keys[:, n], seen["a"][0, len(pair.head) - 1], atol=1e-5)
        assert residuals[:, n].norm() <= 2.0 * seen["s"][0, len(pair.head) - 1].norm() * (1 + 1e-5)
    handle.remove()
    assert losses[-1] < losses[0]
    parts = least_squares.keys_and_residuals(model, layer, pairs, 0, None, steps=20, rate=0.1, reach=2.0, batch=2)
    for one, two in zip((keys, residuals, torch.tensor(losses)), (*parts[:2], torch.tensor(parts[2])), strict=True):
        assert torch.allclose(one, two, atol=1e-4)  # each edit's values are its own
    at_subject = least_squares.keys_and_residuals(model, layer, pairs, 0, [1, 1, 1], steps=1, rate=0.1, reach=2.0)[0]
    handle = layer.register_forward_hook(lambda _m, i, o: seen.update(a=i[0]))
    model(torch.tensor([pairs[0].head]))
    handle.remove()
    assert torch.allclose(at_subject[:, 0], seen["a"][0, 1], atol=1e-5)
