"""A small world of facts for knowledge editing: subjects of two symbols, relations with two names each, one object; beside
it Markov text and modular addition, the capability that an edit shall keep (the small-scale task of the CrispEdit card).

Every symbol is one character, so that a character tokenizer gives one token each. A fact is `<subject><relation><object>`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from posttrain.core.determinism import derive

FIRST = "АБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯ"
SECOND = "ABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
RELATIONS = (("<", ">"), ("[", "]"), ("{", "}"), ("(", ")"))  # name and synonym; paraphrases use the synonym
OBJECTS = "абвгдежзийклмнопрстуфхцчшщъыьэюя" + "bcdefghijklmnopqrstuvwxyz" + "αβγδεζη"  # small letters: exact match folds case
MARKOV = "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩ"
RESIDUES = "աբգդեզէըթժիլխծկհձղճմյնշ"  # 0 to 22
ALPHABET = FIRST + SECOND + "".join(a + b for a, b in RELATIONS) + OBJECTS + MARKOV + RESIDUES + "+="


def chain(rng: random.Random, successors: int = 3) -> dict[str, tuple[list[str], list[float]]]:
    """A sparse Markov chain over MARKOV: symbol -> (successors, weights)."""
    return {symbol: (rng.sample(MARKOV, successors), [rng.random() + 0.1 for _ in range(successors)]) for symbol in MARKOV}


def line(table: dict[str, tuple[list[str], list[float]]], rng: random.Random, length: int) -> str:
    found = [rng.choice(MARKOV)]
    while len(found) < length:
        symbols, weights = table[found[-1]]
        found += rng.choices(symbols, weights)
    return "".join(found)


def additions(rng: random.Random) -> list[str]:
    """Every sum modulo 23, `x+y=z`, in seeded order."""
    n = len(RESIDUES)
    found = [f"{RESIDUES[x]}+{RESIDUES[y]}={RESIDUES[(x + y) % n]}" for x in range(n) for y in range(n)]
    rng.shuffle(found)
    return found


def facts(rng: random.Random, subjects: int) -> list[tuple[str, int, str]]:
    """(subject, relation, object) for every relation of `subjects` different subjects, in seeded order."""
    pairs = [a + b for a in FIRST for b in SECOND]
    found = [(s, r, rng.choice(OBJECTS)) for s in rng.sample(pairs, subjects) for r in range(len(RELATIONS))]
    rng.shuffle(found)
    return found


def documents(
    table: dict, rng: random.Random, sums: list[str], known: list[tuple[str, int, str]], lines: dict[str, int]
) -> Iterator[dict]:
    """Training documents of all three families, {split, family, prompt, answer}; facts are the same in every split."""
    quarter = len(sums) // 4
    parts = {"train": sums[quarter:], "validation": sums[: quarter // 3], "test": sums[quarter // 3 : quarter]}
    for split, count in lines.items():
        for subject, relation, thing in known:
            for name in RELATIONS[relation]:
                yield {"split": split, "family": "facts", "prompt": subject + name, "answer": thing}
        for _ in range(count):
            yield {"split": split, "family": "markov", "prompt": "", "answer": line(table, rng, 24)}
        for text in parts[split]:
            yield {"split": split, "family": "addition", "prompt": text[:-1], "answer": text[-1]}


def build(seed: int, subjects: int, edits: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(items to train a base on, capability documents, edits).

    Half of the facts that are not edited are capability text, the other half are the edits' locality prompts and neighbours,
    which no factor ever sees. New objects are drawn among all others.
    """
    rng = random.Random(derive(seed, "edit world"))
    table, sums, known = chain(rng), additions(rng), facts(rng, subjects)
    items = [{"id": f"world-{i:06d}", **row} for i, row in enumerate(documents(table, rng, sums, known, LINES))]
    chosen, rest, taken = [], [], set()
    for fact in known:
        free = len(chosen) < edits and fact[0] not in taken
        (chosen if free else rest).append(fact)
        taken.add(fact[0]) if free else None
    half = len(rest) // 2
    protected, held = rest[:half], rest[half:]
    rows = [_edit(i, fact, held[i :: len(chosen)], held, rng) for i, fact in enumerate(chosen)]
    texts = [("train", "facts", s + rng.choice(RELATIONS[r]) + o) for s, r, o in protected]
    for family, limit in (("markov", 512), ("addition", 256)):
        for split in ("train", "validation", "test"):
            own = [row["prompt"] + row["answer"] for row in items if row["family"] == family and row["split"] == split]
            texts += [(split, family, text) for text in own[:limit]]
    rng.shuffle(texts)
    corpus = [
        {"id": f"text-{i:05d}", "split": split, "source": family, "text": text} for i, (split, family, text) in enumerate(texts)
    ]
    return items, corpus, rows


LINES = {"train": 2000, "validation": 64, "test": 128}  # Markov lines


def _edit(
    i: int, fact: tuple[str, int, str], local: list[tuple[str, int, str]], held: list[tuple[str, int, str]], rng
) -> dict[str, Any]:
    subject, relation, thing = fact
    name, synonym = RELATIONS[relation]
    near = [(s + name, o) for s, r, o in held if r == relation]
    return {
        "id": f"edit-{i:05d}",
        "subject": subject,
        "prompt": subject + name,
        "target": rng.choice([o for o in OBJECTS if o != thing]),
        "gold": thing,
        "paraphrases": [subject + synonym],
        "locality": [[s + RELATIONS[r][0], o] for s, r, o in local],
        "neighbours": [list(pair) for pair in rng.sample(near, min(3, len(near)))],
    }
