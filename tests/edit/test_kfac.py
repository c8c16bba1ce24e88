"""Factors: the exact case, independent derivatives, padding, merging, files that know whose they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from posttrain.core.errors import UserError
from posttrain.edit import kfac, layers
from posttrain.edit.kfac import accumulate, merge, pad, token_gradients
from tests.checkpoints import tiny

DOWN = ("*.mlp.down_proj",)
ROWS = [[2, 3, 4, 5, 6], [7, 8, 9], [3, 3, 4, 8, 9, 2, 5], [5, 4]]


class OneLayer(torch.nn.Module):
    """A linear-softmax layer that reads one constant vector whatever the tokens are."""

    def __init__(self, vocabulary: int = 6, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(width, vocabulary, bias=False).double()
        self.x = torch.randn(width, dtype=torch.float64)

    def forward(self, input_ids, attention_mask, use_cache):
        return SimpleNamespace(logits=self.head(self.x.expand(*input_ids.shape, -1)))


def test_one_layer_with_one_input_is_exact():
    """kron(S, A) with S in expectation over labels is the Gauss-Newton matrix itself, and S is diag(p) - p pᵀ."""
    model = OneLayer()
    chosen = layers.choose(model, ["head"])
    p = model.head(model.x).softmax(-1).detach()
    ids = torch.zeros(1, 2, dtype=torch.long)
    s = torch.zeros(6, 6, dtype=torch.float64)
    for label in range(6):
        ((a, g),) = token_gradients(model, chosen, ids, torch.ones_like(ids), torch.tensor([[label]])).values()
        s += p[label] * g.T @ g
    expected = torch.diag(p) - torch.outer(p, p)
    assert torch.allclose(s, expected, atol=1e-12)
    j = torch.autograd.functional.jacobian(lambda w: w.view(6, 4) @ model.x, model.head.weight.detach().flatten())
    assert torch.allclose(torch.kron(s, a.T @ a), j.T @ expected @ j, atol=1e-12)


def test_sampled_labels_approach_that_factor_and_follow_the_seed():
    model = OneLayer()
    chosen = layers.choose(model, ["head"])
    p = model.head(model.x).softmax(-1).detach()
    rows = [[0] * 201] * 100
    found = accumulate(model, chosen, rows, labels="sampled", batch=50, seed=1)
    assert found.tokens == 20_000 and (found.s["head"] - torch.diag(p) + torch.outer(p, p)).abs().max() < 0.01
    again, other = (accumulate(model, chosen, rows[:4], labels="sampled", seed=s) for s in (1, 2))
    assert torch.equal(accumulate(model, chosen, rows[:4], labels="sampled", seed=1).s["head"], again.s["head"])
    assert not torch.equal(other.s["head"], again.s["head"])


def test_gradients_are_those_of_the_summed_loss():
    """Against finite differences, with a perturbation added to what the layer writes at one position."""
    model, _ = tiny(1)
    model = model.double()
    chosen = layers.choose(model, DOWN)
    ids, mask = pad([[2, 3, 4, 5, 6]])
    found = token_gradients(model, chosen, ids, mask, "data")
    for name, layer in chosen.items():
        for position, unit in ((0, 3), (2, 7), (3, 0)):
            values = []
            for change in (1e-3, -1e-3):  # the model's norms are in float32 whatever its dtype

                def bump(_m, _i, out, change=change, position=position, unit=unit):
                    out = out.clone()
                    out[0, position, unit] += change
                    return out

                handle = layer.register_forward_hook(bump)
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
                values.append(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item())
                handle.remove()
            seen = {}
            handle = layer.register_forward_hook(lambda _m, i, _o, seen=seen: seen.update(a=i[0]))
            model(input_ids=ids, attention_mask=mask, use_cache=False)
            handle.remove()
            assert torch.allclose(found[name][0][position], seen["a"][0, position])
            slope = (values[0] - values[1]) / 2e-3
            assert found[name][1][position, unit].item() == pytest.approx(slope, rel=2e-3, abs=1e-5)


def test_padding_and_batches_change_nothing_and_the_last_position_is_dropped():
    model, tokenizer = tiny(1)
    model = model.double()
    chosen = layers.choose(model, DOWN)
    one = accumulate(model, chosen, ROWS, batch=1)
    together = accumulate(model, chosen, ROWS, batch=4)
    assert one.tokens == together.tokens == sum(len(r) - 1 for r in ROWS)
    for name in chosen:
        assert torch.allclose(one.a[name], together.a[name], atol=1e-12)
        assert torch.allclose(one.s[name], together.s[name], atol=1e-12)
    # token 0 is a real token here as well, whatever the padding is called
    assert tokenizer.pad_token_id == 0
    zero = accumulate(model, chosen, [[0, 2, 0, 3]])
    assert zero.tokens == 3


def test_factors_are_means_of_outer_products():
    model, _ = tiny(1)
    chosen = layers.choose(model, DOWN)
    ids, mask = pad(ROWS)
    found, single = accumulate(model, chosen, ROWS), token_gradients(model, chosen, ids, mask, "data")
    for name, (a, g) in single.items():
        n = found.tokens
        assert torch.allclose(found.a[name], sum(torch.outer(x, x) for x in a.double()) / n, atol=1e-9)
        assert torch.allclose(found.s[name], sum(torch.outer(x, x) for x in g.double()) / n, atol=1e-9)
        assert found.a[name].dtype == found.s[name].dtype == torch.float64
        assert found.a[name].shape == (32, 32) and found.s[name].shape == (16, 16)


def test_merging_chunks_is_the_whole():
    model, _ = tiny(1)
    chosen = layers.choose(model, DOWN)
    whole = accumulate(model, chosen, ROWS)
    parts = [accumulate(model, chosen, [row]) for row in ROWS]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    assert merged.tokens == whole.tokens
    for name in chosen:
        assert torch.allclose(merged.a[name], whole.a[name], atol=1e-7)
        assert torch.allclose(merged.s[name], whole.s[name], atol=1e-7)
    with pytest.raises(UserError, match="factors of different layers cannot be merged"):
        merge(whole, accumulate(model, layers.choose(model, ["model.layers.0.mlp.up_proj"]), ROWS))


def test_what_needs_gradients_and_the_mode_stay_as_they_were():
    model, _ = tiny(1)
    model.train()
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    accumulate(model, layers.choose(model, DOWN), ROWS)
    assert model.training and not frozen.requires_grad and model.lm_head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters()) and not model.model.layers[0].mlp.down_proj._forward_hooks


def test_text_without_a_prediction_is_one_sentence():
    model, _ = tiny(1)
    with pytest.raises(UserError, match=r"no sequence of two tokens or more; give more text"):
        accumulate(model, layers.choose(model, DOWN), [[2], []])


def test_broken_weights_are_one_sentence():
    model, _ = tiny(1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"factor A of layer model\.layers\.0\.mlp\.down_proj is not finite"):
        accumulate(model, layers.choose(model, DOWN), ROWS)


# --- layers and files -------------------------------------------------------------------------------------------


def test_layers_are_found_by_glob_in_the_models_order():
    model, _ = tiny(0)
    names = list(layers.choose(model, ["model.layers.1.*.down_proj", "model.layers.[01].mlp.up_proj"]))
    assert names == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.layers.0.mlp.down_prj", r"did you mean 'model\.layers\.0\.mlp\.down_proj'\?"),
        ("model.layers.*.mlp.donw_proj", r"did you mean 'model\.layers\.\*\.mlp\.down_proj'\?"),
        ("model.norm", "valid are|did you mean"),
    ],
)
def test_unknown_layers_are_one_sentence_with_the_nearest_names(pattern, hint):
    model, _ = tiny(0)
    with pytest.raises(UserError, match=rf"layers: '.*' matches no linear layer of this model; ({hint})"):
        layers.choose(model, [pattern])


def test_a_file_comes_back_and_has_the_same_bytes_again(tmp_path):
    model, _ = tiny(0)
    chosen = layers.choose(model, DOWN)
    found = accumulate(model, chosen, ROWS)
    one, two = (kfac.save(found, model, chosen, tmp_path / name) for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()
    back = kfac.load(one, model, chosen, ROWS, "data")
    assert (back.tokens, back.labels) == (found.tokens, "data")
    assert all(torch.equal(back.a[n], found.a[n]) and torch.equal(back.s[n], found.s[n]) for n in chosen)
    assert list(kfac.load(one, model, layers.choose(model, ["model.layers.1.mlp.down_proj"]), ROWS, "data").a) == [
        "model.layers.1.mlp.down_proj"
    ]


def test_factors_of_another_model_or_layer_are_refused(tmp_path):
    model, _ = tiny(0)
    chosen = layers.choose(model, DOWN)
    file = kfac.save(accumulate(model, chosen, ROWS), model, chosen, tmp_path / "f")
    other, _ = tiny(1)
    with pytest.raises(UserError, match=r"was computed for other weights of model\.layers\.0\.mlp\.down_proj"):
        kfac.load(file, other, layers.choose(other, DOWN), ROWS, "data")
    with pytest.raises(UserError, match=r"has no factors of layer model\.layers\.0\.mlp\.up_proj; it has model\.layers\.0"):
        kfac.load(file, model, layers.choose(model, ["*.up_proj"]), ROWS, "data")
    with pytest.raises(UserError, match=r"has factors of labels 'data', this job 'sampled'"):
        kfac.load(file, model, chosen, ROWS, "sampled")
    with pytest.raises(UserError, match=r"was computed over other text; give its job and this one the same capability, texts"):
        kfac.load(file, model, chosen, ROWS[:-1], "data")
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    with pytest.raises(UserError, match=r"was computed for another model \(its other layers differ\)"):
        kfac.load(file, model, chosen, ROWS, "data")


def test_what_is_no_file_of_factors_is_one_sentence(tmp_path):
    model, _ = tiny(0)
    chosen = layers.choose(model, DOWN)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(UserError, match=r"text is not a file of factors"):
        kfac.load(tmp_path / "text", model, chosen, ROWS, "data")
    with pytest.raises(UserError, match=r"nothing does not exist"):
        kfac.load(tmp_path / "nothing", model, chosen, ROWS, "data")
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(UserError, match=r"other is not a file of factors"):
        kfac.load(tmp_path / "other", model, chosen, ROWS, "data")


def test_weights_are_lent_and_given_back():
    model, _ = tiny(0)
    chosen = layers.choose(model, DOWN)
    before = layers.copies(chosen)
    with torch.no_grad():
        for layer in chosen.values():
            layer.weight.add_(1)
    with layers.holding(chosen, before):
        assert all(torch.equal(layer.weight, before[name]) for name, layer in chosen.items())
    assert all(torch.equal(layer.weight, before[name] + 1) for name, layer in chosen.items())
