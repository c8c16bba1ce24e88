"""A token mix for language modelling: real text and worked task items in stated shares, as tokenised documents.

Shares are of tokens. What was realised (tokens, documents, epochs per source) is in the manifest.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

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


def draw(documents: list[list[int]], budget: int, seed: int) -> tuple[list[list[int]], float]:
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


def main(job: Config) -> None:
    from posttrain.core.models import load_tokenizer

    if set(job.parts) != set(job.sources):
        raise UserError(f"--parts names {sorted(job.parts)}, --sources {sorted(job.sources)}; they must be the same.")
    manifest.read(job.tokenizer)
    tokenizer = load_tokenizer(job.tokenizer)
    metrics, card, rows = {}, {}, []
    for split in ("train", "validation", "test"):
        total = job.tokens if split == "train" else job.held_out_tokens
        for name, part in sorted(job.parts.items()):
            encoded = tokenizer(texts(name, part, job.sources[name], split), add_special_tokens=False)["input_ids"]
            documents = [[*ids, tokenizer.eos_token_id] for ids in encoded]
            budget = round(total * part.share)
            taken, epochs = draw(documents, budget, derive(job.seed, "mix", name, split))
            rows += [{"split": split, "source": name, "input_ids": ids} for ids in taken]
            if split == "train":
                card[name] = {"tokens": budget, "documents": len(taken), "epochs": round(epochs, 4)}
                metrics[f"tokens/{name}"] = budget
        metrics[f"tokens/{split}"] = sum(len(row["input_ids"]) for row in rows if row["split"] == split)
    file = tables.write(rows, job.folder / "documents.parquet")
    manifest.publish(job, metrics, [file], card={"realised": card})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
