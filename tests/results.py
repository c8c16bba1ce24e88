"""Results of jobs, written by hand: manifests with their tables, for what reads files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.core import manifest, tables
from posttrain.core.manifest import Artifact, Manifest, Metric


def publish(
    root: Path,
    reference: str,
    seed: int = 0,
    files: dict[str, list[dict[str, Any]]] | None = None,
    metrics: dict[str, Metric | float] | None = None,
    *,
    inputs: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    card: dict[str, Any] | None = None,
) -> str:
    """Write the manifest of `<stage>/<method>/<variant>` and its files, over what is there; the manifest's sha256."""
    stage, method, variant = reference.split("/")
    path = root / reference / f"seed{seed}" / manifest.NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    artifacts = {}
    for name, rows in (files or {}).items():
        file = path.parent / name
        if name.endswith(".jsonl"):
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            tables.write(rows, file)
        artifacts[name] = Artifact(sha256=manifest.sha256(file), size=file.stat().st_size)
    found = Manifest(
        stage=stage,
        method=method,
        variant=variant,
        seed=seed,
        config=config or {},
        config_digest="",
        inputs=inputs or {},
        artifacts=artifacts,
        metrics={n: v if isinstance(v, Metric) else Metric(value=v) for n, v in (metrics or {}).items()},
        card=card or {},
        device="cpu",
        packages={"torch": "2.0"},
    )
    path.write_text(found.model_dump_json())
    return manifest.sha256(path)
