"""A token mix for language modelling: real text and worked task items in stated shares, as tokenised documents.

Shares are of tokens. What was realised (tokens, documents, epochs per source) is in the manifest.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_serializer

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, Model, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError


class Part(Model):
    share: float = key(help="share of the token budget", gt=0, le=1)
    field: Literal["text", "demonstration", "expression", "web"] = key(
        help="text: corpus documents; demonstration: prompt + worked response; expression: prompt + bare answer; web: raw form"
    )
    families: tuple[str, ...] = key((), help="take items of these families alone; empty: all")
    when_exhausted: Literal["repeat", "refuse"] = key("repeat", help="after the last document: from the first again, or an error")

    @field_validator("share", mode="before")
    @classmethod
    def _share_of_nothing(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("a part with a share of 0 is never read; delete it or give it a share above 0")
        return value

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: Any) -> dict[str, Any]:
        """Leave out what came later and is at its default: the digests of mixes made before stay."""
        later = {"when_exhausted": ("repeat",), "families": ((), [])}  # a tuple is a list in JSON
        return {name: value for name, value in handler(self).items() if value not in later.get(name, ())}


class Config(JobConfig):
    tokens: int = key(1_000_000, help="token budget of the training split", gt=0)
    held_out_tokens: int = key(50_000, help="token budget of each of validation and test", gt=0)
    parts: dict[str, Part] = key(help="source -> share and field; a source is a corpus (field text) or a task")
    tokenizer: Path = key(help="tokenizer manifest", role="input")
    sources: dict[str, Path] = key(help="manifest of each source named in parts (JSON)", role="input")

    def model_post_init(self, _context) -> None:
        total = sum(part.share for part in self.parts.values())
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the shares of parts sum to {total:g}, not 1; correct them")


def texts(name: str, part: Part, source: Path, split: str) -> list[str]:
    """Documents of one part and split, not yet tokenised."""
    manifest.read(source)
    if part.field == "text":
        rows = tables.read(source.parent / "documents.parquet", ["text"], [("split", "=", split)])
        return [row["text"] for row in rows]
    filters = [("split", "=", split), *([("family", "in", part.families)] if part.families else [])]
    rows = tables.read(source.parent / "items.parquet", None, filters)
    if part.field == "web":
        return [row["web"] for row in rows if row["web"]]
    field = "demonstration" if part.field == "demonstration" else "answer"
    return [row["prompt"] + row[field] for row in rows]


class Encoded(Sequence):
    """Documents that are tokenised when they are asked for, each ending in EOS: a mix often takes a part of a corpus."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts

    def __len__(self) -> int:
        return len(self.texts)

    @functools.cache  # noqa: B019 - lives as long as its job
    def __getitem__(self, index: int) -> list[int]:
        ids = self.tokenizer(self.texts[index], add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]


def draw(documents: Sequence[list[int]], budget: int, seed: int) -> tuple[list[list[int]], float]:
    """Documents in seeded order until the budget is met, again from the start if need be; and how many epochs that is.

    The last document is cut so that shares are exact.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    taken: list[list[int]] = []
    left, count = budget, 0
    while left > 0:
        document = documents[order[count % len(order)]]
        taken.append(document[:left])
        left -= len(taken[-1])
        count += 1
    return taken, count / len(order)


def check(name: str, part: Part, documents: Sequence[list[int]], budget: int, split: str) -> None:
    """Refuse a source that would silently be left out of a split, and one too small for `when_exhausted: refuse`."""
    if not documents or not budget:
        fault, remedy = (
            ("has no documents", "check the source's sizes")
            if budget
            else ("gets no token", f"raise its share or {'tokens' if split == 'train' else 'held_out_tokens'}")
        )
        raise UserError(f"source {name} {fault} in split {split}; {remedy}, or delete it from parts.")
    if part.when_exhausted == "refuse" and (there := sum(map(len, documents))) < budget:
        raise UserError(
            f"source {name} has {there} tokens in split {split} and its share is {budget}; set when_exhausted: repeat, or lower its share or the budget."
        )


def main(job: Config) -> None:
    from posttrain.core.models import load_tokenizer
    from posttrain.data.packed import vocabulary

    if set(job.parts) != set(job.sources):
        raise UserError(f"--parts names {sorted(job.parts)}, --sources {sorted(job.sources)}; they must be the same.")
    manifest.read(job.tokenizer)
    tokenizer = load_tokenizer(job.tokenizer)
    metrics, card, rows = {}, {}, []
    for split in ("train", "validation", "test"):
        total = job.tokens if split == "train" else job.held_out_tokens
        for name, part in sorted(job.parts.items()):
            documents = Encoded(tokenizer, texts(name, part, job.sources[name], split))
            budget = round(total * part.share)
            check(name, part, documents, budget, split)
            taken, epochs = draw(documents, budget, derive(job.seed, "mix", name, split))
            rows += [{"split": split, "source": name, "input_ids": ids} for ids in taken]
            if split == "train":
                card[name] = {"tokens": budget, "documents": len(taken), "epochs": round(epochs, 4)}
                metrics[f"tokens/{name}"] = budget
        metrics[f"tokens/{split}"] = sum(len(row["input_ids"]) for row in rows if row["split"] == split)
    file = tables.write(rows, job.folder / "documents.parquet")
    manifest.publish(job, metrics, [file], card={"realised": card, "vocabulary": vocabulary(tokenizer)})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
