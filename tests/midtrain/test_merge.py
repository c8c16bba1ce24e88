"""Merging two checkpoints: exact at the ends, the stated weights between, refused where it would mean nothing."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core import manifest, models
from posttrain.core.errors import UserError
from posttrain.midtrain import merge
from tests.checkpoints import store, tiny


def job(tmp_path, start, other, weight=0.15) -> merge.Config:
    output = tmp_path / "midtrain" / "merge" / "one" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    return merge.Config(output=output, start=start, other=other, weight=weight)


def tensors(path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "model/model.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(manifest of base, manifest of mid)"""
    root = tmp_path_factory.mktemp("pair")
    return store(root / "base", *tiny(seed=0)), store(root / "mid", *tiny(seed=1))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_end_points_are_the_checkpoints_bit_for_bit(tmp_path, pair, weight):
    one = job(tmp_path, *pair, weight)
    merge.main(one)
    expected, found = tensors(pair[0] if weight else pair[1]), tensors(one.output)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n].view(torch.int32), expected[n].view(torch.int32)) for n in found)


def test_weights_are_the_papers_and_the_result_is_a_model(tmp_path, pair):
    one = job(tmp_path, *pair)
    merge.main(one)
    base, mid, found = tensors(pair[0]), tensors(pair[1]), tensors(one.output)
    for name in base:
        assert torch.allclose(found[name], 0.15 * base[name] + 0.85 * mid[name], atol=1e-7), name
        assert name.endswith("norm.weight") or not torch.allclose(found[name], mid[name], atol=1e-3)
    model = models.load(one.output)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert models.load_tokenizer(one.output).get_vocab() == models.load_tokenizer(pair[1]).get_vocab()
    assert manifest.read(one.output).metrics["tensors"].value == len(base)


def test_bfloat16_checkpoints_are_merged_in_float32(tmp_path, pair):
    halves = [store(tmp_path / str(seed), tiny(seed=seed)[0].bfloat16(), tiny(seed=seed)[1]) for seed in (0, 1)]
    one = job(tmp_path, *halves, 0.25)
    merge.main(one)
    name = "model.layers.0.mlp.up_proj.weight"
    expected = 0.25 * tensors(halves[0])[name].float() + 0.75 * tensors(halves[1])[name].float()
    assert torch.equal(tensors(one.output)[name], expected) and not torch.equal(expected, expected.bfloat16().float())
    assert set(manifest.read(one.output).card["dtypes"]["other"]) == {"BF16"}


def test_copies_of_tied_tensors_stay_tied(tmp_path, pair):
    twice = store(tmp_path / "twice", *tiny(seed=1), copies=True)
    one = job(tmp_path, pair[0], twice)
    merge.main(one)
    model = models.load(one.output)
    assert "lm_head.weight" not in tensors(one.output) and model.lm_head.weight is model.model.embed_tokens.weight


def test_other_shapes_vocabularies_and_functions_are_one_sentence(tmp_path, pair):
    wide = store(tmp_path / "wide", *tiny(seed=0, hidden=24))
    with pytest.raises(UserError, match=r"tensor model\.embed_tokens\.weight is \[\d+, 16\] in .* and \[\d+, 24\]"):
        merge.main(job(tmp_path / "a", pair[0], wide))
    other_words = store(tmp_path / "words", *tiny(seed=0, alphabet="0123456789=ab*"))
    with pytest.raises(UserError, match=r"vocabularies of .* differ"):
        merge.main(job(tmp_path / "b", pair[0], other_words))
    model, tokenizer = tiny(seed=0)
    model.config.rms_norm_eps = 1e-3
    with pytest.raises(UserError, match=r"rms_norm_eps is 1e-06 in the model of .* and 0\.001"):
        merge.main(job(tmp_path / "c", pair[0], store(tmp_path / "eps", model, tokenizer)))


def test_weights_outside_0_and_1_are_refused(tmp_path, pair):
    with pytest.raises(ValueError, match="less than or equal to 1"):
        job(tmp_path, *pair, 1.15)
