"""Prompt and response to token ids, with a mask over the response alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of the rendered user turn, up to where the assistant begins."""
    return tokenizer.apply_chat_template(prompt_messages(prompt), add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def render(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids), the response ending in EOS.

    The ids of the prompt must be a prefix of the ids of the whole conversation; a template that rewrites earlier turns
    or a tokenizer that merges across the border would shift every mask, so it raises :class:`UserError`. What a
    template writes after the EOS of the last turn (a line feed in ChatML) is not part of the response.
    """
    head = prompt_ids(tokenizer, prompt)
    messages = [*prompt_messages(prompt), {"role": "assistant", "content": response}]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    tail = whole[len(head) :]
    if whole[: len(head)] != head or tokenizer.eos_token_id not in tail:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} does not keep the prompt {prompt[:40]!r} as "
            "a token prefix that ends in EOS; use a template whose turns do not change each other."
        )
    end = len(tail) - tail[::-1].index(tokenizer.eos_token_id)
    return head, tail[:end]
