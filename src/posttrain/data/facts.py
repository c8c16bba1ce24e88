"""Real facts in two hops for a language model to memorise: capital -> country code -> region.

They come from a pinned package's country records. Each is one short document, the same in every split: knowing them is
memory, not generalisation. `items.parquet` holds the questions that measure recall, one per hop.
"""

from __future__ import annotations

import json
import random

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import wheels

SPLITS = ("train", "validation", "test")


class Config(JobConfig):
    wheel: wheels.Wheel = key(help="the pinned package")
    prefix: str = key("countryinfo/data/", help="folder of the country records (JSON) inside the wheel")
    count: int = key(96, help="countries to take, in seeded order", gt=2)
    max_letters: int = key(9, help="longest name of a capital", gt=2)


def triples(records: list[dict], max_letters: int) -> list[tuple[str, str, str]]:
    """(capital, ISO 3166 alpha-2 code, region) of usable records: plain letters, each capital and code once, sorted."""
    found: dict[str, tuple[str, str, str]] = {}
    codes: set[str] = set()
    for record in records:
        capital, region, iso = record.get("capital"), record.get("region"), record.get("ISO")
        code = iso.get("alpha2") if isinstance(iso, dict) else None
        if not all(isinstance(value, str) and value.isascii() and value.isalpha() for value in (capital, region, code)):
            continue
        if len(capital) <= max_letters and capital not in found and code not in codes:
            found[capital] = (capital, code, region)
            codes.add(code)
    return [found[name] for name in sorted(found)]


def text(capital: str, code: str, region: str) -> str:
    return f"{capital} {code}. {code} {region}."


def main(job: Config) -> None:
    found = [json.loads(data) for _, data in wheels.members(wheels.fetch(job.wheel), job.prefix, ".json")]
    usable = triples([record for record in found if isinstance(record, dict)], job.max_letters)
    if len(usable) < job.count:
        raise UserError(f"{len(usable)} countries are usable, count is {job.count}; lower count or raise max_letters.")
    random.Random(derive(job.seed, "facts")).shuffle(usable)
    chosen = usable[: job.count]
    documents = [
        {"id": f"facts-{i:05d}", "split": split, "source": "facts", "text": text(*fact)}
        for split in SPLITS
        for i, fact in enumerate(chosen)
    ]
    questions = []
    for i, (capital, code, region) in enumerate(chosen):
        questions.append({"id": f"capital-{i:05d}", "hop": "capital", "prompt": f"{capital} ", "answer": code})
        questions.append({"id": f"region-{i:05d}", "hop": "region", "prompt": f"{capital} {code}. {code} ", "answer": region})
    columns = [{"capital": c, "code": k, "region": r} for c, k, r in chosen]
    files = [
        tables.write(documents, job.folder / "documents.parquet"),
        tables.write(questions, job.folder / "items.parquet"),
        tables.write(columns, job.folder / "facts.parquet"),
    ]
    regions = {name: sum(r == name for _, _, r in chosen) for name in sorted({r for _, _, r in chosen})}
    card = {"licences": {"facts": job.wheel.licence}, "regions": regions, "example": documents[0]["text"]}
    manifest.publish(job, {"facts": len(chosen), "majority_region": max(regions.values()) / len(chosen)}, files, card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
