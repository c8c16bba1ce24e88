"""Models and tokenizers: from scratch by shape, from a folder of the DAG; float32, safetensors, no remote code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core import manifest
from posttrain.core.config import Model, key
from posttrain.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class Shape(Model):
    """A Llama-architecture decoder (RMSNorm, rotary positions, SwiGLU, tied embeddings)."""

    hidden: int = key(64, help="width of the residual stream", gt=0)
    layers: int = key(2, help="number of blocks", gt=0)
    heads: int = key(4, help="attention heads", gt=0)
    intermediate: int = key(176, help="width of the SwiGLU layer", gt=0)
    context: int = key(512, help="longest position", gt=0)

    def model_post_init(self, _context) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}; change one of them")


def scratch(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A randomly initialised float32 Llama for this tokenizer; initialisation follows torch's global seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).float()


def model_folder(path: Path) -> Path:
    """The folder `model/` beside a manifest, after the manifest's artifacts were verified."""
    manifest.read(path)
    folder = path.parent / "model"
    if not folder.is_dir():
        raise UserError(f"{path} has no model beside it; give the manifest of a base, sft or rl job.")
    return folder


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Tokenizer saved beside a manifest (in `model/` or `tokenizer/`)."""
    from transformers import AutoTokenizer

    folder = next((f for f in (path.parent / "model", path.parent / "tokenizer") if f.is_dir()), None)
    if folder is None:
        raise UserError(f"{path} has no tokenizer beside it; give the manifest of a tokenizer or model job.")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load(path: Path, dtype: str = "float32") -> PreTrainedModel:
    """Load the verified model beside a manifest. `dtype`: float32 (trainable default) or bfloat16."""
    return read(model_folder(path), dtype)


def read(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    """Load a model folder that no manifest vouches for yet."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
    )
    model.generation_config.do_sample = False
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[Path]:
    """Write `folder`/model through a temporary folder, replacing an older one; returns the files."""
    target, partial = folder / "model", folder / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return sorted(file for file in target.rglob("*") if file.is_file())


def drop_tied_copies(folder: Path, model: PreTrainedModel) -> list[str]:
    """Delete tensors of a saved model that only repeat a tied one, as ZeRO-1 and 2 write them; returns their names.

    A folder so has the same tensors whatever trained it.
    """
    from safetensors.torch import load_file, save_file

    tied = getattr(model, "_tied_weights_keys", None) or {}
    if not getattr(model.config, "tie_word_embeddings", False):
        return []
    dropped = []
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        copies = [name for name in tied if name in tensors]
        if copies:
            dropped += copies
            save_file({name: value for name, value in tensors.items() if name not in copies}, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if dropped and index.is_file():
        found = json.loads(index.read_text())
        found["weight_map"] = {name: file for name, file in found["weight_map"].items() if name not in dropped}
        index.write_text(json.dumps(found, indent=2) + "\n")
    return dropped


def place(model: PreTrainedModel, device: str = "auto") -> PreTrainedModel:
    """Move to a device; `auto` is this process's GPU if there is one."""
    import torch

    own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    name = (own if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return model.to(name)
