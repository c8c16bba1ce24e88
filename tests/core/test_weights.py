"""Linear combinations of weights: exact at their end points, right between them; lazy reading of saved models."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from posttrain.core import manifest
from posttrain.core.errors import UserError
from posttrain.core.weights import Weights, combine, interpolate, landscape, require_same
from tests.checkpoints import store, tiny

AWKWARD = [-0.0, 0.0, 1.0, -3.5, float("inf"), 1e-40, 65504.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def three(dtype: torch.dtype) -> list[torch.Tensor]:
    """The awkward values meet each other in all orders."""
    first = torch.tensor(AWKWARD, dtype=dtype)
    return [first.roll(n) for n in (0, 2, 5)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_end_points_come_back_bit_for_bit(dtype):
    base, mid, rl = three(dtype)
    assert bits(interpolate(1.0, base, mid)) == bits(base) and bits(interpolate(0.0, base, mid)) == bits(mid)
    for (a, b), expected in {(0.0, 0.0): base, (1.0, 0.0): mid, (1.0, 1.0): rl}.items():
        assert bits(landscape(a, b, base, mid, rl)) == bits(expected)


def test_an_end_point_is_a_copy():
    base, mid, _ = three(torch.float32)
    interpolate(1.0, base, mid).zero_()
    assert base[2] == 1.0


@given(st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_between_them_it_is_the_printed_formula(a, b):
    base, mid, rl = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).unbind()
    wide = [w.double() for w in (base, mid, rl)]
    assert torch.allclose(interpolate(a, base, mid).double(), a * wide[0] + (1 - a) * wide[1], atol=2e-6)
    expected = wide[0] + a * (wide[1] - wide[0]) + b * (wide[2] - wide[1])
    assert torch.allclose(landscape(a, b, base, mid, rl).double(), expected, atol=2e-6)


def test_bfloat16_is_rounded_once():
    """Each partial sum rounded to bf16 would be off by a spacing for some of these."""
    values = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = (0.3, 0.3, 0.4)
    found = combine(list(zip(weights, values, strict=True)))
    exact = sum(c * w.double() for c, w in zip(weights, values, strict=True))
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())
    assert combine([(0.5, torch.ones(2)), (0.5, torch.ones(2).bfloat16())]).dtype == torch.float32
    assert torch.equal(combine([(0.0, torch.ones(2)), (0.0, torch.ones(2))]), torch.zeros(2))


def test_weights_are_those_of_the_model(tmp_path):
    model, tokenizer = tiny(seed=1)
    found = Weights(store(tmp_path / "one", model, tokenizer))
    state = model.state_dict()
    assert set(found.names) == set(state) - {"lm_head.weight"} and found.tied == []  # safetensors holds the tied one once
    for name in found.names:
        assert torch.equal(found.tensor(name), state[name]) and found.shape(name) == tuple(state[name].shape)
    assert found.dtypes() == {"F32": model.num_parameters()}
    assert Weights(store(tmp_path / "half", model.bfloat16(), tokenizer)).dtypes() == {"BF16": model.num_parameters()}


def test_a_tied_tensor_that_is_stored_twice_counts_once(tmp_path):
    path = store(tmp_path / "twice", *tiny(seed=1), copies=True)
    found = Weights(path)
    assert "lm_head.weight" in load_file(path.parent / "model/model.safetensors")
    assert found.tied == ["lm_head.weight"] and "lm_head.weight" not in found.names
    require_same(found, Weights(store(tmp_path / "once", *tiny(seed=2))))
    untied = Weights(store(tmp_path / "untied", *tiny(seed=1, tied=False)))
    assert "lm_head.weight" in untied.names and untied.tied == []


def test_shards_are_read_by_their_index(tmp_path):
    whole = store(tmp_path / "whole", *tiny(seed=1))
    parts = store(tmp_path / "parts", *tiny(seed=1))
    folder = parts.parent / "model"
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    save_file({"stray": torch.zeros(1)}, folder / "other.safetensors")  # named by no index
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = manifest.read(parts, verify=False).model_dump()
    parts.write_text(json.dumps({**found, "artifacts": {}}))
    a, b = Weights(whole), Weights(parts)
    assert b.names == a.names and all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.names)


def test_models_that_do_not_match_are_one_sentence(tmp_path):
    first = Weights(store(tmp_path / "a", *tiny(seed=1)))
    wide = Weights(store(tmp_path / "b", *tiny(seed=1, hidden=24)))
    with pytest.raises(UserError, match=r"tensor model\.embed_tokens\.weight is \[\d+, 16\] in .* and \[\d+, 24\] in .*; give"):
        require_same(first, wide)
    deep = Weights(store(tmp_path / "c", *tiny(seed=1, layers=3)))
    for one, two in ((first, deep), (deep, first)):
        with pytest.raises(UserError, match=r"a/.*manifest.json has no tensor model\.layers\.2\..*one architecture"):
            require_same(one, two)
