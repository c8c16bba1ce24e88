"""Generators of verifiable items: the two-style mechanism task, column addition, reasoning-gym families.

Each yields rows {prompt, answer, demonstration, family}: `demonstration` is a worked correct response (for training a
base model), `answer` what a response is verified against.
"""

from __future__ import annotations

import random
from typing import Any

from posttrain.core.errors import UserError, nearest

DIGITS = "0123456789"
OWN = "QRSTUVWXYZ"


def permutation(seed: int) -> str:
    """The secret digit permutation of style B: a derangement, so that no digit keeps its meaning."""
    rng = random.Random(seed)
    while True:
        letters = list(DIGITS)
        rng.shuffle(letters)
        if all(a != b for a, b in zip(letters, DIGITS, strict=True)):
            return "".join(letters)


def two_style_response(digits: str, style: str, symbols: str) -> str:
    """Response to `digits`= in style 'a' (running sums mod 10 in digits) or 'b' (the same through `symbols`)."""
    total, sums = 0, []
    for digit in digits:
        total = (total + int(digit)) % 10
        sums.append(total)
    written = "".join(DIGITS[s] if style == "a" else symbols[s] for s in sums)
    return f"{style}{written}#{total}"


def two_style(count: int, seed: int, *, length: int, symbols: str) -> list[dict[str, Any]]:
    """Items of the card's mechanism task; the demonstration is style A, `alternative` style B."""
    rng = random.Random(seed)
    if count > 10**length:
        raise UserError(f"two_style: {count} items do not fit into 10^{length} prompts; raise digits or lower the sizes.")
    rows = []
    for value in rng.sample(range(10**length), count):
        digits = f"{value:0{length}d}"
        rows.append(
            {
                "prompt": f"{digits}=",
                "answer": str(sum(map(int, digits)) % 10),
                "demonstration": two_style_response(digits, "a", symbols),
                "alternative": two_style_response(digits, "b", symbols),
                "family": "two_style",
            }
        )
    return rows


def column_addition(a: int, b: int) -> str:
    """Scratchpad from the lowest digit, every step of the same width: '5+8+0=13,4+7+1=12,3+2+1=06#0623' for 345+278.

    A fixed width keeps each step's operands at fixed distances, which is what a two-layer decoder can learn in minutes.
    """
    width, carry, steps = max(len(str(a)), len(str(b))), 0, []
    for i in range(width):
        x, y = a // 10**i % 10, b // 10**i % 10
        steps.append(f"{x}+{y}+{carry}={x + y + carry:02d}")
        carry = (x + y + carry) // 10
    return ",".join(steps) + f"#{a + b:0{width + 1}d}"


def _gym(name: str, size: int, seed: int, options: dict[str, Any]):
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no family '{name}'{nearest(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, AssertionError) as error:
        raise UserError(f"reasoning-gym family '{name}' refuses {options}: {error}") from None


def addition(count: int, seed: int, *, digits: int) -> list[dict[str, Any]]:
    """Sums of two `digits`-digit numbers from reasoning-gym's chain_sum (items with a minus are left out)."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}
    rows, seen, data = [], set(), _gym("chain_sum", count * 4, seed, options)
    for entry in data:
        expression = entry["metadata"]["expression"].replace(" ", "")
        if "-" in expression or expression in seen:
            continue
        seen.add(expression)
        a, b = map(int, expression.split("+"))
        rows.append(
            {
                "prompt": f"{expression}=",
                "answer": entry["answer"],
                "demonstration": column_addition(a, b),
                "family": "addition",
            }
        )
        if len(rows) == count:
            return rows
    raise UserError(
        f"addition: only {len(rows)} distinct items of {count} with {digits} digits; raise digits or lower the sizes."
    )


def reasoning(count: int, seed: int, *, families: dict[str, dict[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """Equal shares of several reasoning-gym families, asked for a boxed answer. Items without an answer are left out."""
    if not families:
        raise UserError("families is empty; name at least one reasoning-gym family.")
    share, rows = -(-count // len(families)), []
    for name, options in sorted(families.items()):
        for entry in _gym(name, share * 2, seed, options):
            if entry["answer"] is None or not str(entry["answer"]).strip():
                continue
            rows.append(
                {
                    "prompt": f"{entry['question'].strip()} {instruction}".strip(),
                    "answer": str(entry["answer"]),
                    "demonstration": f"\\boxed{{{entry['answer']}}}",
                    "family": name,
                }
            )
    random.Random(seed).shuffle(rows)
    return rows
