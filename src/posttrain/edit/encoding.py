"""Prompts and targets as token ids, and batches whose logits are taken at the targets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from posttrain.core.errors import UserError
from posttrain.data import chat as chats
from posttrain.edit.edits import Edit, Row

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


class Pair(NamedTuple):
    """Token ids of a prompt and of what follows it."""

    head: list[int]
    tail: list[int]


class Style(NamedTuple):
    """leading_space: a space between prompt and target, as the authors' code has it. chat: prompt is a user's turn, target
    the assistant's, which then ends in EOS. context: text around a prompt, with {} for it ("{}" for none)."""

    leading_space: bool = True
    chat: bool = False
    context: str = "{}"

    def prompt(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        text = self.context.replace("{}", text)
        return chats.prompt_ids(tokenizer, text) if self.chat else tokenizer(text)["input_ids"]

    def pair(self, tokenizer: PreTrainedTokenizerBase, prompt: str, target: str, where: str = "") -> Pair:
        """Raises UserError if the target has no token, or if the prompt's tokens change when the target follows."""
        at = f"{where}: " if where else ""
        if self.chat:
            head, tail = chats.render(tokenizer, self.context.replace("{}", prompt), target.strip())
        else:
            head = self.prompt(tokenizer, prompt)
            gap = " " if self.leading_space and not prompt[-1:].isspace() else ""
            whole = tokenizer(self.context.replace("{}", prompt) + gap + target.strip())["input_ids"]
            if whole[: len(head)] != head:
                raise UserError(
                    f"{at}the tokens of the prompt {prompt!r} change when {gap + target.strip()!r} follows, so the target has no "
                    f"tokens of its own; {'reword the prompt' if gap else 'set leading_space'}."
                )
            tail = whole[len(head) :]
        if not head or not tail:
            which, text = ("target", target) if head else ("prompt", prompt)
            raise UserError(f"{at}the {which} {text!r} gives no token; the model cannot be taught that.")
        if (unknown := unknown_id(tokenizer)) is not None and unknown in (*head, *tail):
            raise UserError(f"{at}{prompt!r} or {target!r} holds a character that this tokenizer does not know; change the row.")
        return Pair(head, tail)


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of what stands for unknown text; from-scratch tokenizers name it in their model alone."""
    own = getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "unk_token", None)
    name = getattr(tokenizer, "unk_token", None) or own
    return tokenizer.convert_tokens_to_ids(name) if name else None


def encode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], style: Style) -> list[Pair]:
    return [style.pair(tokenizer, edit.prompt, edit.target, where) for edit, where in rows]


def subject_end(tokenizer: PreTrainedTokenizerBase, edit: Edit, style: Style) -> int:
    """Index of the last token of the subject in the prompt: the last one that the text up to the subject's end has."""
    start = edit.prompt.casefold().rfind(edit.subject.casefold())
    before = edit.prompt[: start + len(edit.subject)]
    head = style.prompt(tokenizer, edit.prompt)
    part = style.prompt(tokenizer, before)
    same = 0
    while same < min(len(head), len(part)) and head[same] == part[same]:
        same += 1
    return max(same - 1, 0)


def left_padded(pairs: Sequence[Pair], pad: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """(ids, attention mask, target mask, width of the targets), int64/bool [B, T].

    Padding is on the left, so that all targets end at T and logits are needed for the last `width` + 1 positions alone: of a
    model with a large vocabulary the head is a good part of the cost.
    """
    import torch

    total, width = max(len(p.head) + len(p.tail) for p in pairs), max(len(p.tail) for p in pairs)
    ids = torch.full((len(pairs), total), pad, dtype=torch.long)
    mask, target = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for i, p in enumerate(pairs):
        ids[i, total - len(p.head) - len(p.tail) :] = torch.tensor([*p.head, *p.tail])
        mask[i, total - len(p.head) - len(p.tail) :] = 1
        target[i, total - len(p.tail) :] = True
    return ids, mask, target, width


def target_logits(model: nn.Module, pairs: Sequence[Pair], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [B, W, V], labels [B, W], valid [B, W]) at the targets, W the longest target, padded on the left."""
    import torch

    device = next(model.parameters()).device
    ids, mask, target, width = (x.to(device) if isinstance(x, torch.Tensor) else x for x in left_padded(pairs, pad))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=width + 1)
    return out.logits[:, :-1], ids[:, -width:], target[:, -width:]


def edit_loss(model: nn.Module, pairs: Sequence[Pair], pad: int) -> Tensor:
    """Mean cross-entropy over the target tokens of the batch, nats, float32."""
    from posttrain.core.logprobs import token_logprobs

    logits, labels, valid = target_logits(model, pairs, pad)
    return -token_logprobs(logits[valid], labels[valid]).mean()


def pad_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill up with; masked everywhere, so any will do where the tokenizer names none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return 0 if found is None else found
