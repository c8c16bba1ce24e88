"""Weights of saved models, one tensor at a time: read lazily, checked against each other, combined linearly.

Nothing here holds a whole model, so that several checkpoints of 8B can be compared on a machine that holds one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core import models
from posttrain.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Weights:
    """Tensors of the verified `model/` beside a manifest. A tensor is read from disk when it is asked for.

    names: every stored tensor, sorted; a tied tensor that is stored twice is there once, its copies are in `tied`.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        folder = models.model_folder(path)
        self._where: dict = {}
        for file in _files(folder):
            opened = safe_open(file, framework="pt")
            self._where.update(dict.fromkeys(opened.keys(), opened))
        if not self._where:
            raise UserError(f"{folder} has no safetensors weights; rebuild {path}.")
        self.tied = _tied_copies(folder, self._where)
        self.names = sorted(set(self._where) - set(self.tied))

    def tensor(self, name: str) -> Tensor:
        """A tensor in its storage dtype, on the CPU."""
        return self._where[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def require_parameters_of(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's state, live, after a check that every stored tensor has its place there."""
        state = model.state_dict()
        if unknown := sorted(set(self.names) - set(state)):
            raise UserError(
                f"tensor {unknown[0]} of {self.path} is no weight of its architecture; load and save that model once."
            )
        return state

    def dtypes(self) -> dict[str, int]:
        """Storage dtype (safetensors' word: F32, BF16, ...) -> number of elements stored in it."""
        import math

        found: Counter[str] = Counter()
        for name in self.names:
            found[self._where[name].get_slice(name).get_dtype()] += math.prod(self.shape(name))
        return dict(sorted(found.items()))


def _files(folder: Path) -> list[Path]:
    """The weight files that the index names; without an index, all of them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def _tied_copies(folder: Path, names) -> list[str]:
    """Stored names that only repeat another stored tensor, by the architecture's own list of tied weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not getattr(config, "tie_word_embeddings", False) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return []
    tied = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_tied_weights_keys", None) or {}
    return sorted(copy for copy, source in dict(tied).items() if copy in names and source in names)


def require_same(first: Weights, other: Weights) -> None:
    """Names and shapes of all tensors agree, or one sentence that names the first tensor where they do not."""
    remedy = "give checkpoints of one architecture and vocabulary"
    for one, two in ((first, other), (other, first)):
        if missing := sorted(set(one.names) - set(two.names)):
            raise UserError(f"{two.path} has no tensor {missing[0]}, which {one.path} has; {remedy}.")
    for name in first.names:
        if first.shape(name) != other.shape(name):
            shapes = f"{list(first.shape(name))} in {first.path} and {list(other.shape(name))} in {other.path}"
            raise UserError(f"tensor {name} is {shapes}; {remedy}.")


def combine(terms: Sequence[tuple[float, Tensor]]) -> Tensor:
    """sum_i c_i W_i over (c_i, W_i), tensors of one shape; computed in float32 or wider, rounded once to their common dtype.

    Terms with c = 0 are left out, because 0 * W + V turns -0.0 into 0.0 and an infinity in W into NaN: an end point of an
    interpolation comes back bit for bit. Returns a new tensor.
    """
    import functools

    import torch

    dtype = functools.reduce(torch.promote_types, [value.dtype for _, value in terms])
    wide = torch.promote_types(dtype, torch.float32)
    used = [(c, value.to(wide)) for c, value in terms if c != 0]
    if not used:
        return torch.zeros_like(terms[0][1], dtype=dtype)
    total = used[0][1].clone() if used[0][0] == 1 else used[0][1] * used[0][0]
    for c, value in used[1:]:
        total += value if c == 1 else value * c
    return total.to(dtype)


def interpolate(a: float, w0: Tensor, w1: Tensor) -> Tensor:
    """W = a W0 + (1 - a) W1 (arXiv 2603.17074, merge before long-context training); a = 1 is W0 and a = 0 is W1, bit for bit."""
    return combine([(a, w0), (1 - a, w1)])


def landscape(a: float, b: float, base: Tensor, mid: Tensor, rl: Tensor) -> Tensor:
    """W(a, b) = W_base + a (W_mid - W_base) + b (W_rl - W_mid) (arXiv 2603.17074, eq 3).

    Computed as (1 - a) W_base + (a - b) W_mid + b W_rl, which is the same and gives W_base at (0, 0), W_mid at (1, 0) and
    W_rl at (1, 1) bit for bit; sums of differences would not.
    """
    return combine([(1 - a, base), (a - b, mid), (b, rl)])
