"""Which linear layers are edited: names by glob, their weights, digests that say whose they are."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from posttrain.core.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn


def choose(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """{name: layer} of the linear layers that match one of the globs, in the model's order.

    Every pattern must match at least one `torch.nn.Linear`; a pattern that matches none is one sentence with the nearest
    names (numbers shown as *, so that the list of a deep model stays short).
    """
    from torch import nn

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(linear, pattern)
        if not found:
            shapes = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in linear}
            is_glob = any(sign in pattern for sign in "*?[")
            raise UserError(
                f"layers: '{pattern}' matches no linear layer of this model{nearest(pattern, shapes if is_glob else linear)}"
            )
        chosen.update(found)
    if not chosen:
        raise UserError("layers is empty; name at least one linear layer, for example '*.mlp.down_proj'.")
    return {name: module for name, module in linear.items() if name in chosen}


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bytes."""
    import torch

    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def model_digest(model: nn.Module) -> str:
    """sha256 over every parameter and its name: two checkpoints that differ anywhere have different digests."""
    parts = [f"{name}:{tensor_digest(value)}" for name, value in sorted(model.named_parameters())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def copies(layers: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """Weights of the layers as they are now."""
    return {name: layer.weight.detach().clone() for name, layer in layers.items()}


@contextlib.contextmanager
def holding(layers: dict[str, nn.Linear], weights: dict[str, Tensor]) -> Iterator[None]:
    """Within the block the layers have these weights; afterwards their own again. Spares a second copy of the model."""
    own = {name: layer.weight.data for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.weight.data = weights[name]
        yield
    finally:
        for name, layer in layers.items():
            layer.weight.data = own[name]
