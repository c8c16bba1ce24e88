"""Packed rows of a token mix, and what a model makes of held-out ones: loss per source, recall of facts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core import manifest, tables
from posttrain.core.config import digest
from posttrain.core.errors import UserError
from posttrain.data import packing


def vocabulary(tokenizer: Any) -> str:
    """Digest of which token has which id."""
    return digest(tokenizer.get_vocab())[:16]


def rows(mix: Path, split: str, length: int, tokenizer: Any, *, source: str | None = None, overlap: int = 0) -> list[dict]:
    """Packed rows of one split as a list of {input_ids, position_ids, labels}, each int64 [length]; of one source if named.

    tokenizer: the model's; UserError if the mix was encoded with other ids. overlap: see :func:`posttrain.data.packing.pack`.
    """
    import torch

    if manifest.read(mix).card["vocabulary"] != vocabulary(tokenizer):
        raise UserError(
            f"{mix} was encoded with another tokenizer than the model's; give the mix the tokenizer that the model starts from."
        )
    filters = [("split", "=", split), *([("source", "=", source)] if source else [])]
    documents = [row["input_ids"] for row in tables.read(mix.parent / "documents.parquet", ["input_ids"], filters)]
    packed = {
        name: torch.from_numpy(array) for name, array in packing.pack(documents, length, tokenizer.pad_token_id, overlap).items()
    }
    return [{name: array[i] for name, array in packed.items()} for i in range(len(packed["input_ids"]))]


def held_out_loss(model: Any, data: list[dict], batch: int = 32) -> tuple[float, int]:
    """(mean negative log-likelihood in nats per target token, number of target tokens) over packed rows."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    total, count = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(data), batch):
            part = {k: torch.stack([row[k] for row in data[start : start + batch]]) for k in data[0]}
            labels = part["labels"][:, 1:]
            logits = model(
                input_ids=part["input_ids"].to(model.device), position_ids=part["position_ids"].to(model.device), use_cache=False
            ).logits[:, :-1]
            valid = labels != packing.IGNORE
            total -= token_logprobs(logits[valid], labels[valid].to(logits.device)).double().sum().item()
            count += int(valid.sum())
    return total / count, count


def recall(model: Any, tokenizer: Any, questions: Sequence[dict[str, str]], batch: int = 256) -> list[bool]:
    """Whether greedy decoding would continue each `prompt` with its `answer`, token for token.

    One forward pass: every token of the answer must be the most likely one after the gold tokens before it, which is the
    same as greedy decoding being right. Prompts are plain text, as in training documents.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    found: list[bool] = []
    model.eval()
    for start in range(0, len(questions), batch):
        part = questions[start : start + batch]
        heads = tokenizer([q["prompt"] for q in part], add_special_tokens=False)["input_ids"]
        tails = tokenizer([q["answer"] for q in part], add_special_tokens=False)["input_ids"]
        ids = pad_sequence([torch.tensor(h + t) for h, t in zip(heads, tails, strict=True)], batch_first=True)
        mask = pad_sequence([torch.ones(len(h) + len(t), dtype=torch.long) for h, t in zip(heads, tails, strict=True)], True)
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits[:, :-1]
            right = logits.argmax(-1).cpu() == ids[:, 1:]
        found += [
            bool(right[i, len(h) - 1 : len(h) + len(t) - 1].all()) for i, (h, t) in enumerate(zip(heads, tails, strict=True))
        ]
    return found
