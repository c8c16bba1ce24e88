"""Overlap between training and evaluation text by word n-grams.

Text is reduced to lower-case words first, so re-wrapped lines, punctuation and copies embedded in other text are found.
A text shorter than n words is one gram as a whole: short prompts are compared, not silently skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WORD = re.compile(r"[^\W_]+|[-+*/=^]", re.UNICODE)


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    """The set of word n-grams of a text; the whole text if it has fewer than n words; empty if it has none."""
    words = WORD.findall(text.lower())
    if not words:
        return set()
    if len(words) < n:
        return {tuple(words)}
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def overlap(evaluation: Iterable[str], training: Iterable[str], n: int = 13) -> list[float]:
    """Share of each evaluation text's n-grams that occur in training text, in [0, 1].

    A short evaluation text (m < n words) is looked up among the m-grams of the training texts, so an embedded copy
    of a short prompt counts too.
    """
    evaluation = list(evaluation)
    wanted = [grams(text, n) for text in evaluation]
    by_length: dict[int, set[tuple[str, ...]]] = {}
    for found in wanted:
        for gram in found:
            by_length.setdefault(len(gram), set()).add(gram)
    seen: set[tuple[str, ...]] = set()
    for text in training:
        words = WORD.findall(text.lower())
        for length, candidates in by_length.items():
            for i in range(len(words) - length + 1):
                gram = tuple(words[i : i + length])
                if gram in candidates:
                    seen.add(gram)
    return [len(found & seen) / len(found) if found else 0.0 for found in wanted]
