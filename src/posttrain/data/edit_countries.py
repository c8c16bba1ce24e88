"""Counterfactual edits of real facts: capital, currency code, language and continent of countries, from a pinned package."""

from __future__ import annotations

import random
from typing import Any

from posttrain.core.errors import UserError

TEMPLATES = {  # relation -> prompt, paraphrases
    "capital": ("The capital of {} is", ("{}'s capital city is", "The name of the capital city of {} is")),
    "language": ("The official language of {} is", ("In {}, most people speak", "The main language spoken in {} is")),
    "region": (
        "{} is a country on the continent of",
        ("The continent that {} belongs to is", "On the map, {} lies on the continent of"),
    ),
    "currency": (
        "The currency code of {} is",
        ("Prices in {} are given in the currency", "The three-letter code for the money of {} is"),
    ),
}
LANGUAGES = {  # ISO 639-1, those that are a country's first language in more than one place or well known
    "ar": "Arabic", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish", "fi": "Finnish",
    "fr": "French", "he": "Hebrew", "hu": "Hungarian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish",
    "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
REGIONS = {"Africa": "Africa", "Americas": "America", "Asia": "Asia", "Europe": "Europe", "Oceania": "Oceania"}


def _first(value: Any) -> str:
    found = value[0] if isinstance(value, list) and value else value
    return found if isinstance(found, str) else ""


def facts(records: list[dict]) -> dict[str, dict[str, str]]:
    """relation -> {country: value}, sorted by country; names of plain letters, at most two words."""
    found: dict[str, dict[str, str]] = {relation: {} for relation in TEMPLATES}
    for record in sorted(records, key=lambda r: str(r.get("name"))):
        name, capital, code = record.get("name"), record.get("capital"), _first(record.get("currencies"))
        if not isinstance(name, str) or not (name.isascii() and name.replace(" ", "").isalpha() and name.count(" ") < 2):
            continue
        values = {
            "capital": capital if isinstance(capital, str) and capital.isascii() and capital.isalpha() else "",
            "language": LANGUAGES.get(_first(record.get("languages")), ""),
            "region": REGIONS.get(str(record.get("region")), ""),
            "currency": code if code.isascii() and code.isalpha() and len(code) == 3 else "",
        }
        for relation, value in values.items():
            if value:
                found[relation][name] = value
    return found


def build(records: list[dict], count: int, relations: tuple[str, ...], rng: random.Random) -> list[dict[str, Any]]:
    """`count` edits of different countries, relations in turn. The target is another country's value of the same relation.

    Neighbours ask two countries that are not edited for the same relation, locality a third one for another relation.
    """
    known = facts(records)
    if unknown := [r for r in relations if r not in TEMPLATES]:
        raise UserError(f"relations: '{unknown[0]}' is not known; choose among {', '.join(TEMPLATES)}.")
    whole = sorted(set.intersection(*(set(known[r]) for r in relations)))
    if len(whole) < count + 3:
        raise UserError(
            f"{len(whole)} countries have all of {', '.join(relations)}, count is {count} and three must stay; lower count."
        )
    rng.shuffle(whole)
    chosen, others = whole[:count], whole[count:]
    rows = []
    for i, name in enumerate(chosen):
        relation = relations[i % len(relations)]
        prompt, paraphrases = TEMPLATES[relation]
        gold = known[relation][name]
        away = rng.choice([r for r in relations if r != relation] or [relation])
        near = rng.sample(others, 3)
        rows.append(
            {
                "id": f"{relation}-{i:05d}",
                "subject": name,
                "prompt": prompt.format(name),
                "target": rng.choice(sorted(set(known[relation].values()) - {gold})),
                "gold": gold,
                "paraphrases": [p.format(name) for p in paraphrases],
                "locality": [[TEMPLATES[away][0].format(near[2]), known[away][near[2]]]],
                "neighbours": [[prompt.format(n), known[relation][n]] for n in near[:2]],
            }
        )
    return rows
