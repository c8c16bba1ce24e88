"""What a finished job leaves for a second copy of itself.

A killed driver does not take its jobs along; started again, it submits them a second time, and Snakemake deletes the
manifest before the copy starts, which may be long after the first one finished. The copy then puts the manifest back
instead of working for hours again, if the first one finished after the copy was asked for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from posttrain.core import config as configs
from posttrain.core import manifest
from posttrain.core.codes import PACKAGE, code_digest
from posttrain.core.config import JobConfig
from posttrain.core.errors import UserError

NAME = ".finished.json"


def job_digest(job: JobConfig) -> str:
    """Names configuration, inputs and code of a job; nothing of another digest is ever used for it."""
    paths = {n: getattr(job, n) for n, role in configs.roles(type(job)).items() if role == "input"}
    module = type(job).__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name
    code = code_digest(module) if module.split(".")[0] == PACKAGE else module
    parts = [configs.settings(job), manifest.input_digests(paths), code]
    deepspeed = Path("configs/deepspeed") / f"{getattr(job, 'deepspeed', None)}.json"
    if deepspeed.is_file():
        parts.append(manifest.sha256(deepspeed))
    return configs.digest(parts)[:12]


def leave(job: JobConfig) -> None:
    """After the manifest was published; on rank 0 alone."""
    if int(os.environ.get("RANK", "0")) == 0 and job.output.is_file():
        text = json.dumps({"job": job_digest(job), "manifest": job.output.read_text(encoding="utf-8")})
        manifest.write_atomically(job.folder / NAME, text)


def redeem(job: JobConfig, since: float) -> bool:
    """Whether this very job was finished by another process after `since` (seconds since the epoch); its manifest is then
    there, whole, also if Snakemake had deleted it."""
    receipt = job.folder / NAME
    try:
        if receipt.stat().st_mtime < since:
            return False
        found = json.loads(receipt.read_text(encoding="utf-8"))
        if found["job"] != job_digest(job):
            return False
        if not job.output.is_file():
            manifest.write_atomically(job.output, found["manifest"])
        manifest.read(job.output)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    except UserError:  # an artifact is damaged
        job.output.unlink(missing_ok=True)
        return False
    return job.output.read_text(encoding="utf-8") == found["manifest"]
