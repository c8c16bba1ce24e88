"""Ways to write edits into a model, all through :func:`edit`: gradient steps (fine-tuning, CrispEdit, CrispEdit-Seq),
LoRA, and a closed-form editor. All share batches, targets, stopping rule and layers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from posttrain.core.config import Model, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.edit import kfac, layers, least_squares
from posttrain.edit.edits import Row
from posttrain.edit.encoding import Pair, Style, edit_loss, encode, pad_of, subject_end
from posttrain.edit.projector import ProjectedOptimizer, Subspace, projectors

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class Settings(Model):
    """How edits are written. Defaults are the paper's batch recipe (arXiv 2602.15823, section 5 of the card)."""

    editor: Literal["gradient", "lora", "least_squares"] = key("gradient", help="gradient: fine-tuning, projected or not")
    projection: Literal["none", "grad", "step"] = key(
        "grad", help="none: fine-tuning; grad: the gradient (paper); step: Adam's step"
    )
    subspace: Subspace = key("kfac", help="kfac: CrispEdit; a_only: activations alone; random: control of the same size")
    layers: tuple[str, ...] = key(("*.mlp.down_proj",), help="globs of the linear layers that are edited", min_length=1)
    gamma: float = key(0.9, help="share of the curvature that is protected; large: more protection", ge=0, le=1)
    energy: Literal["layer", "global"] = key("layer", help="take gamma's share per layer, or over all layers together")
    labels: kfac.Labels = key("data", help="data: the text's next token (authors' code); sampled: the model's own (Gauss-Newton)")
    refresh: float | None = key(0.25, help="new factors once a layer moved this far, relative; null: never", gt=0)
    learning_rate: float = key(5e-4, help="Adam's step size", gt=0)
    batch: int = key(32, help="edits per step", gt=0)
    epochs: int = key(25, help="passes over the edits at most", gt=0)
    skip_below: float = key(0.01, help="no step for a batch of smaller loss (nats)", ge=0)
    stop_below: float = key(0.01, help="stop after an epoch of smaller mean loss (nats)", ge=0)
    chunk: int | None = key(None, help="sequential editing in chunks of this many edits; null: all together", gt=0)
    sequential: Literal["stream", "mix"] = key(
        "stream", help="merge factors chunk by chunk, or recompute on text and all edits so far"
    )
    leading_space: bool = key(True, help="a space between prompt and target")
    chat: bool = key(False, help="prompts are user turns of the chat template, targets the assistant's")
    lora_rank: int = key(8, help="lora: rank", gt=0)
    lora_alpha: float = key(16.0, help="lora: scale is alpha / rank", gt=0)
    solve: Literal["covariance", "null_space"] = key(
        "covariance", help="least_squares: penalty by C, or its small directions alone"
    )
    solve_weight: float = key(1.0, help="least_squares: weight of C, or ridge of null_space", gt=0)
    solve_steps: int = key(25, help="least_squares: steps on the values", gt=0)
    solve_rate: float = key(0.5, help="least_squares: Adam's step size on the values", gt=0)
    solve_reach: float = key(4.0, help="least_squares: longest change, as a multiple of the value's norm", gt=0)
    solve_at: Literal["subject", "last"] = key("subject", help="least_squares: edit at the subject's or the prompt's last token")

    @property
    def style(self) -> Style:
        return Style(self.leading_space, self.chat)

    @property
    def needs_factors(self) -> bool:
        return self.editor == "least_squares" or (self.editor == "gradient" and self.projection != "none")


@dataclass
class Stats:
    """What an editor did. Losses in nats per target token, times in seconds (never part of a result)."""

    steps: int = 0
    epochs: int = 0
    skipped: int = 0
    refreshes: int = 0
    loss: float = float("nan")
    losses: list[float] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    projecting: float = 0.0
    factoring: float = 0.0


class Protection:
    """Factors of the capability text and what follows from them; recomputed at the model's weights when asked."""

    def __init__(
        self, model, chosen, settings: Settings, texts: Sequence[Sequence[int]], seed: int, factors, stats: Stats, batch: int
    ):
        self.model, self.chosen, self.settings, self.texts = model, chosen, settings, texts
        self.seed, self.stats, self.batch = seed, stats, batch
        self.factors = factors
        self.recomputed = 0

    def of(self, rows: Sequence[Sequence[int]]) -> kfac.Factors:
        self.recomputed += 1
        seed = derive(self.seed, "labels", self.recomputed)
        return kfac.accumulate(self.model, self.chosen, rows, labels=self.settings.labels, batch=self.batch, seed=seed)

    def projectors(self) -> dict:
        """From the factors as they are; computes them first if there are none. Times are kept in the stats."""
        if self.settings.projection == "none":
            return {}
        began = time.perf_counter()
        if self.factors is None:
            self.factors = self.of(self.texts)
        s = self.settings
        found, self.stats.free = projectors(
            self.factors, s.gamma, subspace=s.subspace, energy=s.energy, seed=derive(self.seed, "random subspace")
        )
        self.stats.factoring += time.perf_counter() - began
        return found

    def renewed(self, *more: Sequence[int]) -> dict:
        """After W has moved: factors over the text and `more` at the current weights."""
        began = time.perf_counter()
        self.factors = self.of([*self.texts, *more])
        self.stats.refreshes += 1
        self.stats.factoring += time.perf_counter() - began
        return self.projectors()

    def merged(self, sequences: Sequence[Sequence[int]]) -> dict:
        """After a chunk of edits: its factors, over whole sequences of prompt and target, join the mean."""
        began = time.perf_counter()
        self.factors = kfac.merge(self.factors, self.of(sequences))
        self.stats.factoring += time.perf_counter() - began
        return self.projectors()


def edit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    edits: Sequence[Row],
    settings: Settings,
    *,
    texts: Sequence[Sequence[int]] = (),
    factors: kfac.Factors | None = None,
    seed: int = 0,
    text_batch: int = 8,
) -> Stats:
    """Write the edits into `model`, in place: only weights of the chosen layers change.

    texts: token ids of the capability text, for editors that protect it and have no `factors` of it yet, and for refreshes.
    Raises UserError on edits that cannot be encoded, on a loss that is not finite, and where text is needed but missing.
    """
    chosen = layers.choose(model, settings.layers)
    if not edits:
        raise UserError("there are no edits to write; give at least one.")
    if settings.needs_factors and factors is None and not texts:
        raise UserError(
            f"editor {settings.editor} with projection {settings.projection} needs capability text; give --capability."
        )
    pairs, pad, stats = encode(tokenizer, edits, settings.style), pad_of(tokenizer), Stats()
    model.eval()  # dropout would be noise on a handful of examples
    requires = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(False)
    guard = Protection(model, chosen, settings, texts, seed, factors, stats, text_batch)
    try:
        if settings.editor == "least_squares":
            _closed_form(model, tokenizer, edits, pairs, pad, settings, chosen, guard, stats)
        elif settings.editor == "lora":
            _lora(model, pairs, pad, settings, list(chosen), seed, stats)
        else:
            _gradient(model, pairs, pad, settings, chosen, guard, seed, stats)
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(requires.get(name, True))
    return stats


def adam(settings: Settings):
    import torch

    return lambda tensors: torch.optim.Adam(tensors, lr=settings.learning_rate, weight_decay=0.0)


def fit(model, pairs: Sequence[Pair], pad: int, settings: Settings, seed: int, stats: Stats, step, after=lambda: None) -> None:
    """Epochs over shuffled edits in batches until the epoch's mean loss is below `stop_below`. step: one optimiser step from
    the gradients; after: what follows each step."""
    order = list(range(len(pairs)))
    shuffle = random.Random(derive(seed, "edits", len(stats.losses)))
    for _ in range(settings.epochs):
        shuffle.shuffle(order)
        total, count = 0.0, 0
        for start in range(0, len(order), settings.batch):
            began = time.perf_counter()
            part = [pairs[i] for i in order[start : start + settings.batch]]
            loss = edit_loss(model, part, pad)
            value = loss.item()
            if value != value or value == float("inf"):
                raise UserError(
                    f"the edits' loss is {value} at step {stats.steps}; lower learning_rate (now {settings.learning_rate})."
                )
            total, count = total + value * len(part), count + len(part)
            if value < settings.skip_below:
                stats.skipped += 1
                continue
            loss.backward()
            step()
            stats.steps += 1
            stats.step_seconds.append(time.perf_counter() - began)
            after()
        stats.epochs += 1
        stats.loss = total / count
        stats.losses.append(stats.loss)
        if stats.loss < settings.stop_below:
            break


def _gradient(model, pairs, pad, settings: Settings, chosen, guard: Protection, seed: int, stats: Stats) -> None:
    for layer in chosen.values():
        layer.weight.requires_grad_(True)
    optimizer = ProjectedOptimizer(
        {name: layer.weight for name, layer in chosen.items()}, adam(settings), guard.projectors(), settings.projection
    )

    done: list[list[int]] = []  # edits of the chunks before, whole sequences

    def look() -> None:
        can = settings.projection != "none" and settings.refresh is not None and guard.texts
        if can and optimizer.moved() > settings.refresh:
            optimizer.refresh(guard.renewed(*done))

    size = settings.chunk or len(pairs)
    for start in range(0, len(pairs), size):
        fit(model, pairs[start : start + size], pad, settings, seed, stats, optimizer.step, look)
        if settings.projection == "none" or start + size >= len(pairs):
            continue
        chunk = [p.head + p.tail for p in pairs[start : start + size]]
        done += chunk
        renewed = guard.renewed(*done) if settings.sequential == "mix" else guard.merged(chunk)
        optimizer.refresh(renewed)
    stats.projecting = optimizer.seconds
    stats.loss = mean_loss(model, pairs, pad, settings.batch)


def mean_loss(model, pairs: Sequence[Pair], pad: int, batch: int) -> float:
    """Mean over all edits of their batches' losses, nats per target token: later chunks may have undone earlier ones."""
    import torch

    with torch.inference_mode():
        parts = [pairs[start : start + batch] for start in range(0, len(pairs), batch)]
        return sum(edit_loss(model, part, pad).item() * len(part) for part in parts) / len(pairs)


def _lora(model, pairs, pad, settings: Settings, names: list[str], seed: int, stats: Stats) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(derive(seed, "lora"))
    config = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=names, lora_dropout=0.0)
    wrapped = get_peft_model(model, config)
    weights = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    optimizer = ProjectedOptimizer(weights, adam(settings), {}, "none")
    size = settings.chunk or len(pairs)
    for start in range(0, len(pairs), size):
        fit(wrapped, pairs[start : start + size], pad, settings, seed, stats, optimizer.step)
    merged = wrapped.merge_and_unload()
    if merged is not model:
        raise RuntimeError("this version of peft does not merge in place")
    if hasattr(model, "peft_config"):
        del model.peft_config
    stats.loss = mean_loss(model, pairs, pad, settings.batch)


def _closed_form(model, tokenizer, edits, pairs, pad, settings: Settings, chosen, guard: Protection, stats: Stats) -> None:
    import torch

    name, layer = list(chosen.items())[-1]
    if guard.factors is None:
        began = time.perf_counter()
        guard.factors = guard.of(guard.texts)
        stats.factoring += time.perf_counter() - began
    covariance = guard.factors.a[name]
    size = settings.chunk or len(pairs)
    for start in range(0, len(pairs), size):
        part, rows = pairs[start : start + size], edits[start : start + size]
        ends = [subject_end(tokenizer, row.edit, settings.style) for row in rows] if settings.solve_at == "subject" else None
        began = time.perf_counter()
        keys, residuals, losses = least_squares.keys_and_residuals(
            model,
            layer,
            part,
            pad,
            ends,
            steps=settings.solve_steps,
            rate=settings.solve_rate,
            reach=settings.solve_reach,
            batch=settings.batch,
        )
        if settings.solve == "covariance":
            update = least_squares.covariance_update(keys, residuals, covariance, settings.solve_weight)
        else:
            update = least_squares.null_space_update(keys, residuals, covariance, settings.gamma, settings.solve_weight)
        with torch.no_grad():
            layer.weight.add_(update.to(layer.weight.dtype))
        stats.step_seconds.append(time.perf_counter() - began)
        stats.losses += losses
    stats.steps, stats.epochs, stats.loss = len(stats.step_seconds), 1, mean_loss(model, pairs, pad, settings.batch)
