"""Where a student begins: at random, at a checkpoint, or cut from its teacher.

Cut (arXiv 2602.20816 through public notes): the teacher's attention weights cut to the student's hidden size, MLPs at random.
Inferred: the first heads, evenly spaced layers, and embeddings cut to the same first dimensions, since attention weights mean
something in the teacher's residual basis alone; norms as at initialisation. Students cut from one teacher are alike, so random
MLPs and data order, which follow the seed, are all that differs between seeds.
"""

from __future__ import annotations

import copy
from typing import Any

from posttrain.core.errors import UserError
from posttrain.core.models import Shape

JOINED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv")  # queries, keys and values in one tensor: no leading part is its heads


def layer_of(layer: int, student: int, teacher: int) -> int:
    """The teacher's layer for a student's layer: evenly spaced, the first and the last are kept."""
    return round(layer * (teacher - 1) / max(student - 1, 1))


def smaller(teacher: Any, shape: Shape) -> Any:
    """The teacher's configuration at another shape, with its ratio of query to key heads and its head size."""
    config = copy.deepcopy(teacher.config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ratio = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if shape.hidden > config.hidden_size or shape.layers > config.num_hidden_layers or shape.heads > config.num_attention_heads:
        raise UserError(
            f"shape {shape.model_dump()} is larger than the teacher in one respect; a student can only be cut smaller."
        )
    if shape.hidden // shape.heads != size and getattr(config, "head_dim", None) is None:
        raise UserError(
            f"shape: hidden {shape.hidden} over heads {shape.heads} is not the teacher's head size {size}, which its rotary positions need; choose heads = {shape.hidden // size}."
        )
    if shape.heads % ratio:
        raise UserError(f"shape: heads {shape.heads} is not a multiple of {ratio}, the teacher's queries per key; change heads.")
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[layer_of(i, shape.layers, config.num_hidden_layers)] for i in range(shape.layers)]
    config.hidden_size, config.num_attention_heads, config.intermediate_size = shape.hidden, shape.heads, shape.intermediate
    config.num_hidden_layers, config.num_key_value_heads = shape.layers, shape.heads // ratio
    return config


def cut(teacher: Any, shape: Shape) -> Any:
    """A float32 model of the teacher's architecture with its attention and embedding weights, cut; the rest is random."""
    import torch

    config = smaller(teacher, shape)
    student = type(teacher)(config).float()  # not from_config, which under ZeRO-3 gives parameters without a shape
    embeddings = [m.weight for m in (student.get_input_embeddings(), student.get_output_embeddings()) if m is not None]
    have, total = teacher.state_dict(), teacher.config.num_hidden_layers
    with torch.no_grad():
        for name, value in student.named_parameters():
            words = name.split(".")
            if "self_attn" in words:
                at = words.index("layers") + 1
                words[at] = str(layer_of(int(words[at]), shape.layers, total))
                if words[-2] in JOINED:
                    raise UserError(
                        f"the teacher keeps queries, keys and values in one tensor ({name}); such a student is not cut yet."
                    )
                value.copy_(have[".".join(words)][tuple(slice(n) for n in value.shape)].float())  # heads are leading rows
            elif any(value is one for one in embeddings):
                value.copy_(have[name][:, : value.shape[1]].float())
    return student
