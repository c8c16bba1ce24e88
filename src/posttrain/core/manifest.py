"""The contract between rules: one small `manifest.json` per job, published last and atomically.

The manifest holds only what follows from configuration, inputs, code and packages, so that an identical rerun writes
an identical file and Snakemake stops there. Times, memory, host and commit are provenance and lie beside it in
`provenance.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from posttrain.core import config as configs
from posttrain.core.config import JobConfig, Model
from posttrain.core.errors import UserError

SCHEMA_VERSION = 1
MAX_BYTES = 1_000_000  # Snakemake compares inputs by content only below this size
NAME = "manifest.json"
PACKAGES = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "deepspeed", "numpy", "reasoning_gym")
_STARTED = time.time()


class Metric(Model):
    """One number with what it rests on."""

    value: float
    n: int | None = Field(None, description="number of independent units behind the value")
    se: float | None = Field(None, description="standard error over those units")


class Artifact(Model):
    sha256: str
    size: int


class Manifest(Model):
    schema_version: int = SCHEMA_VERSION
    stage: str
    method: str
    variant: str
    seed: int
    config: dict[str, Any]
    config_digest: str
    inputs: dict[str, str] = Field(description="sha256 of each input manifest")
    artifacts: dict[str, Artifact] = Field(description="files beside the manifest, by relative path")
    metrics: dict[str, Metric]
    card: dict[str, Any] = Field(default_factory=dict, description="what a reader wants to know about the artifact")
    not_deterministic: str | None = Field(None, description="why metrics differ between identical runs, if they do")
    device: str
    packages: dict[str, str]

    @property
    def identity(self) -> str:
        return f"{self.stage}/{self.method}/{self.variant}/seed{self.seed}"


def sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def packages() -> dict[str, str]:
    """Versions of the packages that numbers depend on (installed ones only), and of Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu"


def identity(output: Path) -> tuple[str, str, str, int]:
    """(stage, method, variant, seed) from `.../<stage>/<method>/<variant>/seed<k>/manifest.json`."""
    parts = output.parts
    if len(parts) < 5 or parts[-1] != NAME or not re.fullmatch("seed[0-9]+", parts[-2]):
        raise UserError(f"--output {output}: give a path that ends in <stage>/<method>/<variant>/seed<k>/{NAME}.")
    return parts[-5], parts[-4], parts[-3], int(parts[-2].removeprefix("seed"))


def check_address(job: JobConfig) -> tuple[str, str, str, int]:
    """Identity of a job's output; its seed must be the job's. Asked before any work, and again by :func:`publish`."""
    found = identity(job.output)
    if found[-1] != job.seed:
        raise UserError(f"--seed {job.seed} and the folder seed{found[-1]} of --output differ; make them the same.")
    return found


def metric(values: Iterable[float]) -> Metric:
    """Mean, n and standard error of per-unit values."""
    values = [float(v) for v in values]
    n = len(values)
    if n == 0:
        raise UserError("a metric over zero items is undefined; check that the evaluation split is not empty.")
    mean = math.fsum(values) / n
    spread = math.fsum((v - mean) ** 2 for v in values)
    return Metric(value=mean, n=n, se=math.sqrt(spread / (n - 1) / n) if n > 1 else None)


def publish(
    job: JobConfig,
    metrics: Mapping[str, Metric | float],
    artifacts: Iterable[Path] = (),
    *,
    card: Mapping[str, Any] | None = None,
    not_deterministic: str | None = None,
    timings: Mapping[str, float] | None = None,
) -> Manifest:
    """Hash the artifacts and write provenance, then the manifest. Only global rank 0 writes.

    `metrics` values may be floats or :class:`Metric`. Raises :class:`UserError` on a metric that is not finite.
    """
    stage, method, variant, seed = check_address(job)
    measured = {n: v if isinstance(v, Metric) else Metric(value=float(v)) for n, v in sorted(metrics.items())}
    for name, value in measured.items():
        if not math.isfinite(value.value):
            raise UserError(
                f"metric {name} of {job.output} is {value.value}; look at the job's log for the first step where it happened."
            )
    files = {}
    for path in sorted(set(artifacts)):
        files[str(path.relative_to(job.folder))] = Artifact(sha256=sha256(path), size=path.stat().st_size)
    paths = {n: getattr(job, n) for n, role in configs.roles(type(job)).items() if role == "input"}
    effective = configs.settings(job)
    result = Manifest(
        stage=stage,
        method=method,
        variant=variant,
        seed=seed,
        config=effective,
        config_digest=configs.digest(effective),
        inputs=input_digests(paths),
        artifacts=files,
        metrics=measured,
        card=dict(card or {}),
        not_deterministic=not_deterministic,
        device=device(),
        packages=packages(),
    )
    text = json.dumps(result.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if len(text.encode()) >= MAX_BYTES:
        raise UserError(
            f"{job.output} would be {len(text)} bytes; move per-item values to a parquet artifact (limit {MAX_BYTES})."
        )
    if int(os.environ.get("RANK", "0")) == 0:
        write_atomically(job.folder / "provenance.json", json.dumps(provenance(timings), indent=1) + "\n")
        write_atomically(job.output, text)
    return result


def input_digests(paths: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of every manifest among the input keys; a key may hold one path, several, or a mapping of paths."""
    found: dict[str, str] = {}
    for name, value in paths.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            found.update({f"{name}.{k}": sha256(Path(v)) for k, v in value.items()})
        elif isinstance(value, list | tuple):
            found.update({f"{name}.{i}": sha256(Path(v)) for i, v in enumerate(value)})
        else:
            found[name] = sha256(Path(value))
    return dict(sorted(found.items()))


def provenance(timings: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What is true of this attempt only. Never read by a rule."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wall_seconds": round(time.time() - float(os.environ.get("POSTTRAIN_STARTED", _STARTED)), 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_memory_mb": round(usage.ru_maxrss / 1024, 1),
        "timings": dict(timings or {}),
        "host": socket.gethostname(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "commit": commit.stdout.strip() or None,
        "command": [sys.executable, *sys.argv],
    }


def read(path: str | Path, *, verify: bool = True) -> Manifest:
    """Read and check a manifest: schema, sizes and (up to 1 GiB per file) sha256 of the artifacts beside it."""
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found.get("schema_version", SCHEMA_VERSION) if isinstance(found, dict) else SCHEMA_VERSION
        if version != SCHEMA_VERSION:  # before the rest, which another version may call otherwise
            raise UserError(f"{path} has schema version {version}, this code reads {SCHEMA_VERSION}; delete and rebuild it.")
        result = Manifest.model_validate(found)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; build it with `snakemake {path}`.") from None
    except ValueError as error:  # broken JSON, broken UTF-8, another schema
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a manifest ({reason}); delete it and run `snakemake {path}`.") from None
    for name, artifact in result.artifacts.items() if verify else ():
        file = path.parent / name
        if not file.is_file():
            raise UserError(f"{file} is missing, though {path} names it; delete the manifest and run `snakemake {path}`.")
        size = file.stat().st_size
        if size != artifact.size or (size <= 2**30 and sha256(file) != artifact.sha256):
            raise UserError(f"{file} differs from what {path} records; delete the manifest and run `snakemake {path}`.")
    return result
