"""Reasoning domains for mid-training and RL, each with a scratchpad between <think> and </think>: math, code, science.

math: running sums modulo `modulus`; code: a program of one-letter instructions on a register; science: two hops over the
facts that the web text teaches (capital -> code -> region). All splits are disjoint in their operands: prompts for math
and code, capitals for science. `web` is the raw form without a scratchpad, as web text has it. chat: turns to fill a mix
with, not verifiable. As in distilled traces, some training demonstrations may slip at one step and go on from there, so that
what imitation gives leaves room for RL.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, Model, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import verify

SPLITS = ("test", "validation", "train")
INSTRUCTIONS: dict[str, Callable[[int], int]] = {
    "i": lambda x: x + 1,
    "d": lambda x: x - 1,
    "n": lambda x: -x,
    "x": lambda x: 2 * x,
}
Domain = Literal["math", "code", "science", "chat"]


class Sizes(Model):
    train: int = key(help="training items", gt=0)
    validation: int = key(help="validation items", gt=0)
    test: int = key(help="test items", gt=0)

    @property
    def total(self) -> int:
        return self.train + self.validation + self.test


class Config(JobConfig):
    domains: dict[Domain, Sizes] = key(help="domain -> its sizes", min_length=1)
    modulus: int = key(5, help="math, code: all numbers are modulo this", ge=2, le=10)
    steps: int = key(5, help="math: digits to add up; code: instructions", gt=0)
    slips: float = key(0.0, help="math, code: share of training demonstrations with one wrong step", ge=0, lt=1)
    facts: Path | None = key(None, help="science: facts manifest", role="input")

    def model_post_init(self, _context) -> None:
        if "science" in self.domains and self.facts is None:
            raise ValueError("the domain science needs facts; name a data/facts job")


def demonstration(steps: str, answer: str) -> str:
    return f"<think>{steps}</think>{answer}"


def values(start: int, functions: list[Callable[[int], int]], modulus: int, slip: tuple[int, int] | None) -> str:
    """A register after each function, one digit each. slip = (step, shift): that value is off by `shift`, and so what follows."""
    found, value = "", start
    for step, function in enumerate(functions):
        value = function(value) % modulus
        if slip and slip[0] == step:
            value = (value + slip[1]) % modulus
        found += str(value)
    return found


def math(code: int, steps: int, modulus: int, slip: tuple[int, int] | None = None) -> dict[str, str]:
    """The `code`-th of modulus^steps items: digits and their running sums."""
    digits = []
    for _ in range(steps):
        code, digit = divmod(code, modulus)
        digits.append(digit)
    adders = [lambda x, d=d: x + d for d in digits]
    written, answer = "".join(map(str, digits)), values(0, adders, modulus, None)[-1]
    return {
        "prompt": f"m{written}=",
        "answer": answer,
        "steps": values(0, adders, modulus, slip),
        "web": f"{written} is {answer}. ",
    }


def program(code: int, steps: int, modulus: int, slip: tuple[int, int] | None = None) -> dict[str, str]:
    """The `code`-th of modulus * 4^steps items: a register's start, instructions, and its value after each."""
    code, start = divmod(code, modulus)
    names = ""
    for _ in range(steps):
        code, which = divmod(code, len(INSTRUCTIONS))
        names += list(INSTRUCTIONS)[which]
    functions = [INSTRUCTIONS[name] for name in names]
    answer = values(start, functions, modulus, None)[-1]
    return {
        "prompt": f"c{start}{names}=",
        "answer": answer,
        "steps": values(start, functions, modulus, slip),
        "web": f"{start}{names} is {answer}. ",
    }


def science(facts: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    for fact in facts:
        yield {"prompt": f"{fact['capital']}?", "answer": fact["region"], "steps": fact["code"], "web": ""}


def chat(count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Turns in which the assistant repeats a word."""
    seen: set[str] = set()
    while len(seen) < count:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))
        if word not in seen:
            seen.add(word)
            yield {"prompt": f"User: say {word}\nAssistant:", "answer": word, "steps": "", "web": ""}


def generate(domain: Domain, job: Config) -> list[dict[str, str]]:
    """As many distinct items of a domain as its sizes want, in seeded order; those that may slip stand last."""
    rng, sizes = random.Random(derive(job.seed, "domains", domain)), job.domains[domain]
    count = sizes.total
    if domain == "chat":
        return list(chat(count, rng))
    if domain == "science":
        manifest.read(job.facts)
        facts = tables.read(job.facts.parent / "facts.parquet")
        rng.shuffle(facts)
        found, room = list(science(facts))[:count], len(facts)
    else:
        make, room = (math, job.modulus**job.steps) if domain == "math" else (program, job.modulus * 4**job.steps)
        slipping = random.Random(derive(job.seed, "slips", domain))
        found = []
        for i, code in enumerate(rng.sample(range(room), min(count, room))):
            slip = (slipping.randrange(job.steps), slipping.randrange(1, job.modulus)) if slipping.random() < job.slips else None
            found.append(make(code, job.steps, job.modulus, slip if i >= count - sizes.train else None))
    if room < count:
        raise UserError(f"{domain}: {room} distinct items, {count} wanted; lower its train, validation or test.")
    return found


def table(job: Config) -> list[dict[str, Any]]:
    rows = []
    for domain, sizes in job.domains.items():
        items = iter(generate(domain, job))
        for split in SPLITS:
            for i in range(getattr(sizes, split)):
                item = next(items)
                steps = item.pop("steps")
                conclusion = item["answer"] if domain == "science" else steps[-1:]  # a slip has its own answer
                text = f" {item['answer']}" if domain == "chat" else demonstration(steps, conclusion)
                rows.append({"id": f"{domain}-{split}-{i:05d}", "split": split, "family": domain, "demonstration": text, **item})
    return rows


def main(job: Config) -> None:
    rows = table(job)
    right = [row["family"] == "chat" or verify.correct(row["demonstration"], row["answer"], "think") for row in rows]
    wrong = [row for row, good in zip(rows, right, strict=True) if not good]
    for row in wrong:
        if row["split"] != "train" or not job.slips:
            raise UserError(f"demonstration {row['demonstration']!r} does not give {row['answer']!r}; the generator is wrong.")
    file = tables.write(rows, job.folder / "items.parquet")
    metrics = {f"items/{domain}/{split}": getattr(sizes, split) for domain, sizes in job.domains.items() for split in SPLITS}
    metrics["wrong_demonstrations"] = len(wrong)
    examples = {domain: next(row for row in rows if row["family"] == domain) for domain in job.domains}
    manifest.publish(job, metrics, [file], card={"answer_style": "think", "examples": examples})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
