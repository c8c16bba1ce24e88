"""Reasoning domains for mid-training and RL, each with a scratchpad between <think> and </think>: math, code, science.

math: running sums modulo `modulus`; code: a program of one-letter instructions on a register; science: two hops over the
facts that the web text teaches (city -> country -> continent), recalled in the words of that text. All splits are disjoint in
their operands: prompts for math and code, cities for science; and so are two jobs of which one is `apart_from` the other, so
that RL never draws a prompt that mid-training demonstrated. `web` is the raw form without a scratchpad, as web text has it.
chat: turns to fill a mix with, not verifiable.
"""

from __future__ import annotations

import itertools
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
    validation: int = key(0, help="validation items", ge=0)
    test: int = key(0, help="test items", ge=0)

    @property
    def total(self) -> int:
        return self.train + self.validation + self.test


class Config(JobConfig):
    domains: dict[Domain, Sizes] = key(help="domain -> its sizes", min_length=1)
    modulus: int = key(5, help="math, code: all numbers are modulo this", ge=2, le=10)
    steps: int = key(5, help="math: digits to add up; code: instructions", gt=0)
    facts: Path | None = key(None, help="science: facts manifest", role="input")
    apart_from: Path | None = key(None, help="manifest of another domains job whose prompts are left out", role="input")

    def model_post_init(self, _context) -> None:
        if "science" in self.domains and self.facts is None:
            raise ValueError("the domain science needs facts; name a data/facts job")


def demonstration(steps: str, answer: str) -> str:
    return f"<think>{steps}</think>{answer}"


def values(start: int, functions: list[Callable[[int], int]], modulus: int) -> str:
    """A register after each function, one digit each."""
    found, value = "", start
    for function in functions:
        value = function(value) % modulus
        found += str(value)
    return found


def math(code: int, steps: int, modulus: int) -> dict[str, str]:
    """The `code`-th of modulus^steps items: digits and their running sums."""
    digits = []
    for _ in range(steps):
        code, digit = divmod(code, modulus)
        digits.append(digit)
    adders = [lambda x, d=d: x + d for d in digits]
    written, steps_written = "".join(map(str, digits)), values(0, adders, modulus)
    answer = steps_written[-1]
    return {"prompt": f"m{written}=", "answer": answer, "steps": steps_written, "web": f"{written} is {answer}. "}


def program(code: int, steps: int, modulus: int) -> dict[str, str]:
    """The `code`-th of modulus * 4^steps items: a register's start, instructions, and its value after each."""
    code, start = divmod(code, modulus)
    names = ""
    for _ in range(steps):
        code, which = divmod(code, len(INSTRUCTIONS))
        names += list(INSTRUCTIONS)[which]
    written = values(start, [INSTRUCTIONS[name] for name in names], modulus)
    answer = written[-1]
    return {"prompt": f"c{start}{names}=", "answer": answer, "steps": written, "web": f"{start}{names} is {answer}. "}


def science(facts: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    for fact in facts:
        recalled = f"{fact['code']}. {fact['code']} {fact['continent']}"  # as the web text goes on after a name
        yield {"prompt": f"{fact['city']}?", "answer": fact["continent"], "steps": recalled, "web": ""}


def chat(count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Turns in which the assistant repeats a word."""
    seen: set[str] = set()
    while len(seen) < count:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))
        if word not in seen:
            seen.add(word)
            yield {"prompt": f"User: say {word}\nAssistant:", "answer": word, "steps": "", "web": ""}


def taken(job: Config) -> set[str]:
    """Prompts of the job that this one keeps apart from."""
    if job.apart_from is None:
        return set()
    manifest.read(job.apart_from)
    return {row["prompt"] for row in tables.read(job.apart_from.parent / "items.parquet", ["prompt"])}


def generate(domain: Domain, job: Config, others: set[str]) -> list[dict[str, str]]:
    """As many distinct items of a domain as its sizes want, in seeded order, none with a prompt in `others`."""
    rng, count = random.Random(derive(job.seed, "domains", domain)), job.domains[domain].total
    if domain == "chat":
        return list(chat(count, rng))
    if domain == "science":
        manifest.read(job.facts)
        facts = tables.read(job.facts.parent / "facts.parquet")
        rng.shuffle(facts)
        items: Iterator[dict[str, str]] = science(facts)
    else:
        make, room = (math, job.modulus**job.steps) if domain == "math" else (program, job.modulus * 4**job.steps)
        items = (make(code, job.steps, job.modulus) for code in rng.sample(range(room), room))
    found = list(itertools.islice((item for item in items if item["prompt"] not in others), count))
    if len(found) < count:
        apart = f" apart from those of {job.apart_from}" if others else ""
        raise UserError(f"{domain}: {len(found)} distinct items{apart}, {count} wanted; lower its train, validation or test.")
    return found


def table(job: Config) -> list[dict[str, Any]]:
    rows, others = [], taken(job)
    for domain, sizes in job.domains.items():
        items = iter(generate(domain, job, others))
        for split in SPLITS:
            for i in range(getattr(sizes, split)):
                item = next(items)
                steps = item.pop("steps")
                end = steps[-len(item["answer"]) :]  # a thought has its own end, which `main` checks
                text = f" {item['answer']}" if domain == "chat" else demonstration(steps, end)
                rows.append({"id": f"{domain}-{split}-{i:05d}", "split": split, "family": domain, "demonstration": text, **item})
    return rows


def main(job: Config) -> None:
    rows = table(job)
    for row in rows:
        if row["family"] != "chat" and not verify.correct(row["demonstration"], row["answer"], "think"):
            raise UserError(f"demonstration {row['demonstration']!r} does not give {row['answer']!r}; the generator is wrong.")
    file = tables.write(rows, job.folder / "items.parquet")
    metrics = {f"items/{domain}/{split}": getattr(sizes, split) for domain, sizes in job.domains.items() for split in SPLITS}
    examples = {domain: next(row for row in rows if row["family"] == domain) for domain in job.domains}
    manifest.publish(job, metrics, [file], card={"answer_style": "think", "examples": examples})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
