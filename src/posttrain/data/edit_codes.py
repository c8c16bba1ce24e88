"""Counterfactual edits of facts that a from-scratch model was trained on: the country code of a capital (data/facts).

Prompts are written as the training text has them. The paraphrase asks inside a scratchpad, as science items of data/domains do.
"""

from __future__ import annotations

import random
from typing import Any

from posttrain.core.errors import UserError


def build(facts: list[dict[str, str]], count: int, rng: random.Random) -> list[dict[str, Any]]:
    """`count` edits of different capitals; the target is the code of another country.

    facts: rows {capital, code, region}. Neighbours ask two capitals that are not edited for their code, locality a third
    one's code for its region.
    """
    if len(facts) < count + 3:
        raise UserError(f"there are {len(facts)} facts, count is {count} and three must stay; lower count.")
    facts = sorted(facts, key=lambda fact: fact["capital"])
    rng.shuffle(facts)
    chosen, others = facts[:count], facts[count:]
    codes = sorted(fact["code"] for fact in facts)
    rows = []
    for i, fact in enumerate(chosen):
        one, two, away = rng.sample(others, 3)
        rows.append(
            {
                "id": f"code-{i:05d}",
                "subject": fact["capital"],
                "prompt": f"{fact['capital']} ",
                "target": rng.choice([code for code in codes if code != fact["code"]]),
                "gold": fact["code"],
                "paraphrases": [f"{fact['capital']}?<think>"],
                "locality": [[f"{away['capital']} {away['code']}. {away['code']} ", away["region"]]],
                "neighbours": [[f"{near['capital']} ", near["code"]] for near in (one, two)],
            }
        )
    return rows
