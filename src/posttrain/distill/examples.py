"""Rows that teacher and student see: packed text of a mix, demonstrations of a task, or stored traces; and one vocabulary.

A row is {input_ids, position_ids, labels}, int64 [T]. Text: all tokens are targets. Demonstrations and traces: response tokens
alone. Rows are padded on the right, where a causal model needs no mask: padding counts as one more document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.data import chat, packed
from posttrain.data.packing import IGNORE

if TYPE_CHECKING:
    from torch import Tensor


class Source(NamedTuple):
    """Where rows come from: exactly one of three manifests."""

    mix: Path | None
    task: Path | None
    traces: Path | None

    @property
    def held_out(self) -> str:
        """The split that arms are judged on: traces have no test split."""
        return "validation" if self.traces else "test"

    def rows(self, split: str, length: int, tokenizer: Any) -> list[dict[str, Tensor]]:
        """All rows of a split, in the order of their file. `length`: tokens of a packed row, longest row otherwise."""
        path = next(p for p in self if p)
        manifest.read(path)
        if self.mix:
            return packed.rows(path, split, length, tokenizer)
        if self.task:
            items = tables.read(path.parent / "items.parquet", None, [("split", "=", split)])
            pairs = [chat.render(tokenizer, item["prompt"], item["demonstration"]) for item in items]
        else:
            stored = tables.read(path.parent / "traces.parquet", None, [("split", "=", split)])
            pairs = [(row["prompt_ids"], row["response_ids"]) for row in stored if row["correct"]]
            if (largest := max((max(*p, *r) for p, r in pairs), default=0)) >= (size := vocabulary_of(tokenizer)):
                raise UserError(
                    f"{path} holds the token id {largest}, and the student's tokenizer has {size} tokens; take traces of a model of its family."
                )
        found = [supervised(prompt, response, length) for prompt, response in pairs if len(prompt) < length]
        if not found:
            raise UserError(f"{path} has no row of at most {length} tokens in split {split}; raise length.")
        return found


def supervised(prompt: Sequence[int], response: Sequence[int], length: int) -> dict[str, Tensor]:
    """One row of a prompt and its response, cut to `length` tokens; only response tokens are targets."""
    import torch

    ids = torch.tensor([*prompt, *response][:length])
    labels = ids.clone()
    labels[: len(prompt)] = IGNORE
    return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "labels": labels}


def collate(rows: Sequence[dict[str, Tensor]], pad: int) -> dict[str, Tensor]:
    """Rows padded on the right to the longest: int64 [B, T]; stored log-probabilities [T, V] to zeros [B, T, V]."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    longest = max(len(row["input_ids"]) for row in rows)
    found = {
        "input_ids": pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=pad),
        "labels": pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=IGNORE),
        "position_ids": torch.stack(
            [torch.cat([row["position_ids"], torch.arange(longest - len(row["position_ids"]))]) for row in rows]
        ),
    }
    if "logps" in rows[0]:
        found["logps"] = pad_sequence([row["logps"] for row in rows], batch_first=True)
    return found


def following(labels: Tensor) -> tuple[Tensor, Tensor]:
    """(next tokens int64 [B, T], mask bool [B, T]) aligned with logits: position t predicts the token t + 1."""
    import torch

    moved = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], 1)
    return moved, moved != IGNORE


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """[B, T, V] of one model, documents of a packed row blind to each other (position_ids)."""
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


def fingerprint(rows: Sequence[dict[str, Tensor]]) -> str:
    """sha256 over ids and labels of rows in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["input_ids"].numpy().tobytes() + row["labels"].numpy().tobytes())
    return digest.hexdigest()


def vocabulary_of(tokenizer: Any) -> int:
    """Number of leading ids that hold all tokens."""
    return 1 + max(tokenizer.get_vocab().values())


def one_vocabulary(teacher: Any, student: Any, where: tuple[Path, Path]) -> int:
    """Number of tokens of two tokenizers that have the same token at every id; else a sentence that names the first that differs."""
    sizes = [vocabulary_of(tokenizer) for tokenizer in (teacher, student)]
    for token in range(max(sizes)):
        words = [t.convert_ids_to_tokens(token) if token < n else None for t, n in zip((teacher, student), sizes, strict=True)]
        if words[0] != words[1]:
            raise UserError(
                f"token {token} is {words[0]!r} for the teacher {where[0]} and {words[1]!r} for the student {where[1]}; divergences need one vocabulary, choose models of one family."
            )
    return sizes[0]


def columns(vocabulary: int, *models: Any) -> int | None:
    """Leading logit columns in use: `vocabulary`, or None if every model has just these. A model with fewer is refused."""
    sizes = [model.config.vocab_size for model in models]
    if min(sizes) < vocabulary:
        raise UserError(f"a model has {min(sizes)} logits for {vocabulary} tokens of its tokenizer; resize its embeddings first.")
    return None if max(sizes) == vocabulary else vocabulary
