"""From scratch, saved, loaded; damage is named before a number is computed from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, models
from posttrain.core.config import JobConfig
from posttrain.core.errors import UserError
from posttrain.data.tokenizer import characters, wrap

SHAPE = models.Shape(hidden=16, layers=2, heads=2, intermediate=32, context=64)


@pytest.fixture(scope="module")
def tokenizer():
    return wrap(characters("0123456789=ab#"))


def build(tokenizer, seed: int = 0):
    torch.manual_seed(seed)
    return models.scratch(SHAPE, tokenizer).eval()


@pytest.fixture
def saved(tmp_path, tokenizer) -> tuple[Path, torch.nn.Module]:
    output = tmp_path / "base" / "scratch" / "m" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    model = build(tokenizer)
    manifest.publish(JobConfig(output=output), {}, models.save(model, tokenizer, output.parent))
    return output, model


def refused(function, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        function(path)
    return str(caught.value)


def test_scratch(tokenizer):
    model = build(tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer) == 16 and model.config.max_position_embeddings == 64
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    block = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
    assert model.num_parameters() == 16 * 16 + 2 * block + 16


def test_scratch_follows_the_global_seed(tokenizer):
    def weights(seed):
        return torch.cat([p.flatten() for p in build(tokenizer, seed).parameters()])

    assert torch.equal(weights(0), weights(0)) and not torch.equal(weights(0), weights(1))


def test_shape_that_does_not_divide():
    with pytest.raises(ValueError, match="hidden 10 is not a multiple of heads 4; change one of them"):
        models.Shape(hidden=10)


def test_loaded_model_is_the_saved_one(saved, tokenizer):
    path, model = saved
    again = models.load(path).eval()
    ids = torch.arange(16)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert {p.dtype for p in again.parameters()} == {torch.float32} and again.generation_config.do_sample is False
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    loaded = models.load_tokenizer(path)
    assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        "left",
    )


def test_dtype_is_asked_for_never_the_checkpoints(saved, tokenizer):
    path, _ = saved
    assert models.load(path, "bfloat16").dtype == torch.bfloat16
    half = build(tokenizer).to(torch.bfloat16)
    manifest.publish(JobConfig(output=path), {}, models.save(half, tokenizer, path.parent))
    assert models.load(path).dtype == torch.float32


def test_weights_are_safetensors_alone_and_an_older_folder_is_replaced(saved, tokenizer):
    path, _ = saved
    (path.parent / "model" / "left_over.json").write_text("{}")
    files = models.save(build(tokenizer, 1), tokenizer, path.parent)
    names = {file.name for file in files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert "left_over.json" not in names and not {n for n in names if n.endswith((".bin", ".pt", ".pkl", ".py"))}
    assert not (path.parent / ".model.partial").exists()


def test_an_interrupted_save_leaves_the_old_model(saved, tokenizer, monkeypatch):
    path, _ = saved
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        models.save(build(tokenizer, 1), tokenizer, path.parent)
    models.load(path)


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:-1], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])]
)
def test_damaged_weights_are_named(saved, damage):
    path, _ = saved
    weights = path.parent / "model" / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    assert (
        refused(models.load, path)
        == f"{weights} differs from what {path} records; delete the manifest and run `snakemake {path}`."
    )


def test_missing_weights_are_named(saved):
    path, _ = saved
    (path.parent / "model" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(models.load, path)


def test_manifest_without_model(tmp_path):
    output = tmp_path / "data" / "tasks" / "m" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    manifest.publish(JobConfig(output=output), {})
    assert "has no model beside it; give the manifest of a base, sft or rl job" in refused(models.load, output)
    assert "has no tokenizer beside it" in refused(models.load_tokenizer, output)
    assert "does not exist" in refused(models.load, output.parent / "other.json")


def test_tokenizer_job_has_its_own_folder(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert models.load_tokenizer(tmp_path / "manifest.json").get_vocab() == tokenizer.get_vocab()


def test_place(tokenizer):
    model = build(tokenizer)
    assert models.place(model, "cpu") is model and models.place(model).device.type == (
        "cuda" if torch.cuda.is_available() else "cpu"
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_head_that_was_written_twice_is_dropped(tmp_path, sharded):
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}  # clones, as DeepSpeed's gathering does
    model.save_pretrained(tmp_path, state_dict=state, max_shard_size="2KB" if sharded else "1GB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1 if sharded else len(files) == 1
    assert any("lm_head.weight" in load_file(file) for file in files)
    assert models.drop_tied_copies(tmp_path, model) == ["lm_head.weight"]
    assert not any("lm_head.weight" in load_file(file) for file in files)
    assert models.drop_tied_copies(tmp_path, model) == []
    again = models.read(tmp_path)
    ids = torch.arange(6)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    untied = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    untied.save_pretrained(tmp_path / "untied")
    assert models.drop_tied_copies(tmp_path / "untied", untied) == []
    assert "lm_head.weight" in load_file(tmp_path / "untied" / "model.safetensors")
