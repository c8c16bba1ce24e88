"""Counterfactual edits of facts that a from-scratch model was trained on: the country code of a city (data/facts).

Prompts are written as the training text has them. The paraphrase asks inside a scratchpad, as science items of data/domains do.
"""

from __future__ import annotations

import random
from typing import Any

from posttrain.core.errors import UserError


def build(facts: list[dict[str, str]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """`count` edits of different cities; the target is the code of another country.

    facts: rows {city, code, continent}. Neighbours ask two cities that are not edited for their code, locality a third
    one's code for its continent.
    """
    if len(facts) < count + 3:
        raise UserError(f"there are {len(facts)} facts, count is {count} and three must stay; lower count.")
    facts = sorted(facts, key=lambda fact: fact["city"])
    rng.shuffle(facts)
    chosen, others = facts[:count], facts[count:]
    codes = sorted(fact["code"] for fact in facts)
    rows = []
    for i, fact in enumerate(chosen):
        one, two, away = rng.sample(others, 3)
        rows.append(
            {
                "id": f"code-{i:05d}",
                "subject": fact["city"],
                "prompt": f"{fact['city']} ",
                "target": rng.choice([code for code in codes if code != fact["code"]]),
                "gold": fact["code"],
                "paraphrases": [f"{fact['city']}?<think>"],
                "locality": [[f"{away['city']} {away['code']}. {away['code']} ", away["continent"]]],
                "neighbours": [[f"{near['city']} ", near["code"]] for near in (one, two)],
            }
        )
    return rows
