"""Facts to edit, as `edits.jsonl` in the format of posttrain.edit: a from-scratch world, real countries, refusals, codes of
capitals that a model was trained on, or a file of your own (any format that posttrain.edit reads, copied as it is)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal

from posttrain.core import cli, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import edit_codes, edit_countries, edit_refusals, edit_world, wheels

FILE = "edits.jsonl"


class Config(JobConfig):
    kind: Literal["world", "countries", "refusals", "codes", "file"] = key(
        help="world: also text to train a base on and capability text"
    )
    count: int = key(64, help="edits", gt=0)
    subjects: int = key(256, help="world: subjects, with four facts each", gt=3, le=1024)
    relations: tuple[str, ...] = key(
        ("capital", "language", "region", "currency"), help="countries: relations, in turn", min_length=1
    )
    wheel: wheels.Wheel | None = key(None, help="countries: the pinned package")
    prefix: str = key("countryinfo/data/", help="countries: folder of the records (JSON) inside the wheel")

    file: str | None = key(None, help="file: your .jsonl or .json, relative to the repository's root")
    facts: Path | None = key(None, help="codes: facts manifest", role="input")

    def model_post_init(self, _context) -> None:
        if (self.kind == "countries") != (self.wheel is not None):
            raise ValueError("kind countries and wheel belong together; give both or neither")
        if (self.kind == "codes") != (self.facts is not None):
            raise ValueError("kind codes and facts belong together; give both or neither")
        if (self.kind == "file") != (self.file is not None):
            raise ValueError("kind file and file belong together; give both or neither")


def copied(job: Config) -> None:
    """A user's file beside the manifest. What its rows are is read, and checked row by row, by the job that edits."""
    try:
        data = Path(job.file).read_bytes()
    except OSError as error:
        raise UserError(f"{job.file}: {error.strerror}; put your edits there, or correct `file` in data.yaml.") from None
    if not data.strip():
        raise UserError(f"{job.file} holds no edits; give at least one.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{job.file}: byte {error.start} is not UTF-8; save the file as UTF-8.") from None
    manifest.write_atomically(job.folder / FILE, text)
    manifest.publish(job, {"bytes": len(data)}, [job.folder / FILE], card={"file": job.file})


def main(job: Config) -> None:
    if job.kind == "file":
        return copied(job)
    rng = random.Random(derive(job.seed, "edits", job.kind))
    files, card = [], {}
    if job.kind == "world":
        if job.count > job.subjects:
            raise UserError(f"count {job.count} is above subjects {job.subjects}: each edit has its own subject; lower count.")
        items, corpus, rows = edit_world.build(job.seed, job.subjects, job.count)
        files = [tables.write(items, job.folder / "items.parquet"), tables.write(corpus, job.folder / "documents.parquet")]
        card = {"alphabet": edit_world.ALPHABET, "example": items[0]["prompt"] + items[0]["answer"]}
    elif job.kind == "countries":
        found = [json.loads(data) for _, data in wheels.members(wheels.fetch(job.wheel), job.prefix, ".json")]
        rows = edit_countries.build([r for r in found if isinstance(r, dict)], job.count, job.relations, rng)
        card = {"licences": {"facts": job.wheel.licence}}
    elif job.kind == "codes":
        manifest.read(job.facts)
        rows = edit_codes.build(tables.read(job.facts.parent / "facts.parquet"), job.count, rng)
    else:
        if job.count > len(edit_refusals.REQUESTS):
            raise UserError(f"count {job.count} is above the {len(edit_refusals.REQUESTS)} requests that there are; lower count.")
        rows = edit_refusals.build(job.count, rng)
        card = {"licences": {"requests": "our own"}}
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    manifest.write_atomically(job.folder / FILE, text)
    metrics = {
        "edits": len(rows),
        "paraphrases": sum(len(row["paraphrases"]) for row in rows),
        "locality": sum(len(row.get("locality", ())) for row in rows),
        "neighbours": sum(len(row.get("neighbours", ())) for row in rows),
    }
    manifest.publish(job, metrics, [*files, job.folder / FILE], card={**card, "first_edit": rows[0]})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
