"""Verifiable rewards for TRL's GRPO trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.data import verify


def text_of(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion, in TRL's plain or conversational form."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact_answer(style: verify.AnswerStyle, keep: list[dict[str, Any]] | None = None) -> Callable[..., list[float]]:
    """A reward function: 1.0 for the verified answer, else 0.0. The dataset's `answer` column is the gold.

    `keep` receives the rows of the latest call (for a table of rollouts).
    """

    def reward(prompts, completions, answer, **_) -> list[float]:
        texts = [text_of(completion) for completion in completions]
        values = [float(verify.correct(text, gold, style)) for text, gold in zip(texts, answer, strict=True)]
        if keep is not None:
            keep[:] = [
                {"prompt": text_of(p), "completion": t, "answer": a, "reward": v}
                for p, t, a, v in zip(prompts, texts, answer, values, strict=True)
            ]
        return values

    return reward
