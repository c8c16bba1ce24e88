"""Tiny checkpoints with a manifest, as a base, mid-training or RL job leaves them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from posttrain.core import manifest, models
from posttrain.data.tokenizer import Config, characters, wrap

ALPHABET = "0123456789=ab#"


def tiny(seed: int, *, hidden: int = 16, layers: int = 2, tied: bool = True, alphabet: str = ALPHABET):
    """(random Llama, character tokenizer)."""
    torch.manual_seed(seed)
    tokenizer = wrap(characters(alphabet))
    shape = models.Shape(hidden=hidden, layers=layers, heads=2, intermediate=32, context=64)
    model = models.scratch(shape, tokenizer)
    if not tied:
        model.config.tie_word_embeddings = False
        model = type(model)(model.config)
    return model, tokenizer


def store(folder: Path, model, tokenizer, *, copies: bool = False) -> Path:
    """Save under `folder` and return the manifest. copies: tied tensors are stored twice, as some trainers do."""
    output = folder / "base" / "scratch" / "one" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    files = models.save(model, tokenizer, output.parent)
    if copies:
        file = output.parent / "model/model.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"})
    manifest.publish(Config(output=output, kind="characters", alphabet="a"), {}, files)
    return output


def corpus(folder: Path, texts: list[str]) -> Path:
    """A corpus whose test split is `texts`."""
    from posttrain.core import tables

    output = folder / "data" / "corpus" / "one" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    rows = [{"id": str(i), "source": "s", "text": text, "split": "test"} for i, text in enumerate(texts)]
    file = tables.write([*rows, {**rows[0], "split": "train"}], output.parent / "documents.parquet")
    manifest.publish(Config(output=output, kind="characters", alphabet="a"), {}, [file])
    return output
