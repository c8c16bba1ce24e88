"""Is this answer right? Strict parsing in linear time, without evaluation of text, without signals (thread-safe).

`hash`: the answer is all that follows the only '#'. `boxed`: it is the content of the only \\boxed{...}. `think`: the text
has the form <think> ... </think> answer, as a format gate demands; `think_optional`: the same without the gate, the answer
is what follows </think>, or the whole text if there is none.
An answer that cannot be parsed is wrong; a gold answer that cannot be parsed is an error in the data, never a reward.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

AnswerStyle = Literal["hash", "boxed", "think", "think_optional"]
_INTEGER_GROUPS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d+)?|\.\d+)")


def extract(text: str, style: AnswerStyle) -> str | None:
    """The one answer in `text`, stripped; None if there is none, more than one, or it is empty."""
    if style == "hash":
        _, mark, after = text.partition("#")
        answer = after.strip()
        return answer if mark and answer and "#" not in after else None
    if style in ("think", "think_optional"):
        return _after_thought(text, gate=style == "think")
    start = text.find("\\boxed{")
    if start < 0 or text.find("\\boxed{", start + 1) >= 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin + 1 : i].strip() or None
    return None


def _after_thought(text: str, *, gate: bool) -> str | None:
    before, mark, after = text.partition("</think>")
    if gate and not (mark and before.lstrip().startswith("<think>") and before.count("<think>") == 1):
        return None
    answer = (after if mark else text).strip()
    return answer if answer and "<think>" not in answer and "</think>" not in answer else None


def number(text: str) -> Decimal | None:
    """A plain decimal number, thousands separators allowed where they group by three; None for anything else."""
    text = text.strip()
    if not text.isascii() or len(text) > 100:
        return None
    if _INTEGER_GROUPS.fullmatch(text):
        text = text.replace(",", "")
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def equal(answer: str, gold: str) -> bool:
    """Numbers by value (007 = 7, 7.0 = 7), other text to the letter after folding case and white space."""
    a, b = number(answer), number(gold)
    if (a is None) != (b is None):
        return False
    if a is not None:
        return a == b
    return " ".join(answer.lower().split()) == " ".join(gold.lower().split())


def correct(text: str, gold: str, style: AnswerStyle) -> bool:
    """Whether the response `text` answers `gold`. An empty gold raises ValueError."""
    if not gold.strip():
        raise ValueError("gold answer is empty")
    answer = extract(text, style)
    return answer is not None and equal(answer, gold)
