"""Several small decoders of one shape that are trained at once: every weight has a leading axis of M models.

At the size of the known-source study a step costs mostly calls, not arithmetic; M models in one call share that cost and stay
independent: no operation mixes models, each has its own data, learning rate and gradient norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Weights = dict[str, "Tensor"]


def initial(vocabulary: int, length: int, width: int, layers: int, seeds: Sequence[int]) -> Weights:
    """GPT weights [M, ...] float32: normal with deviation 0.02 in the embeddings, 1/sqrt(width) in what maps; model m follows
    seeds[m] alone. Pre-norm (gains, no biases), learnt positions, an MLP of four times the width, an untied output."""
    import torch

    def shapes() -> dict[str, tuple[tuple[int, ...], float]]:
        found = {"embedding": ((vocabulary, width), 0.02), "position": ((length, width), 0.02)}
        for i in range(layers):
            found[f"{i}.qkv"] = ((width, 3 * width), width**-0.5)
            found[f"{i}.out"] = ((width, width), (2 * layers * width) ** -0.5)
            found[f"{i}.up"] = ((width, 4 * width), width**-0.5)
            found[f"{i}.down"] = ((4 * width, width), (8 * layers * width) ** -0.5)
        return found | {"head": ((width, vocabulary), width**-0.5)}

    models = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        models.append({n: torch.randn(shape, generator=generator) * std for n, (shape, std) in shapes().items()})
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    for i in range(layers):
        stacked |= {f"{i}.norm1": torch.ones(len(models), width), f"{i}.norm2": torch.ones(len(models), width)}
    stacked["norm"] = torch.ones(len(models), width)
    return {name: value.requires_grad_() for name, value in stacked.items()}


def forward(weights: Weights, tokens: Tensor, heads: int) -> Tensor:
    """Logits [M, B, T, V] float32 for tokens int64 [M, B, T]."""
    import torch
    from torch.nn import functional

    m, b, t = tokens.shape
    width = weights["embedding"].shape[-1]
    layers = sum(name.endswith(".qkv") for name in weights)
    at = tokens + torch.arange(m, device=tokens.device)[:, None, None] * weights["embedding"].shape[1]
    x = functional.embedding(at, weights["embedding"].flatten(0, 1)) + weights["position"][:, None, :t]

    def norm(value: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(value, (width,), eps=1e-6) * gain[:, None, None]

    def times(value: Tensor, matrix: Tensor) -> Tensor:
        return torch.bmm(value.reshape(m, b * t, -1), matrix).view(m, b, t, -1)

    for i in range(layers):
        qkv = times(norm(x, weights[f"{i}.norm1"]), weights[f"{i}.qkv"])
        q, k, v = qkv.view(m * b, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + times(mixed.transpose(1, 2).reshape(m, b, t, width), weights[f"{i}.out"])
        hidden = functional.gelu(times(norm(x, weights[f"{i}.norm2"]), weights[f"{i}.up"]))
        x = x + times(hidden, weights[f"{i}.down"])
    return times(norm(x, weights["norm"]), weights["head"])


class Adam:
    """Adam (betas 0.9 and 0.999, no weight decay, no clipping) with one learning rate per model."""

    def __init__(self, weights: Weights, rates: Sequence[float]) -> None:
        import torch

        self.weights, self.step_count = weights, 0
        self.rates = torch.tensor(rates)
        self.first = {name: torch.zeros_like(value) for name, value in weights.items()}
        self.second = {name: torch.zeros_like(value) for name, value in weights.items()}

    def step(self) -> Tensor:
        """Update the weights and drop their gradients; returns each model's gradient norm [M]."""
        import torch

        self.step_count += 1
        squares = torch.zeros(len(self.rates))
        with torch.no_grad():
            for name, value in self.weights.items():
                gradient = value.grad
                squares += gradient.flatten(1).square().sum(1)
                self.first[name].lerp_(gradient, 0.1)
                self.second[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                scale = self.rates / (1 - 0.9**self.step_count)
                root = (self.second[name] / (1 - 0.999**self.step_count)).sqrt_().add_(1e-8)
                value -= scale.view(-1, *[1] * (value.dim() - 1)) * self.first[name] / root
                value.grad = None
        return squares.sqrt()
