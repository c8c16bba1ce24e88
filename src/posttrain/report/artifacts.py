"""What plots and page share: manifests and the files beside them, intervals over seeds and items, colour per arm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError
from posttrain.core.manifest import Manifest
from posttrain.core.stats import Interval, bootstrap, pass_at_k
from posttrain.core.tracking import read_history

if TYPE_CHECKING:
    import numpy as np

BASE = "base"
# Okabe and Ito's colours, darkened where they would be too pale as lines on white; yellow is replaced.
COLOURS = ("#0072b2", "#c98200", "#009e73", "#cc5fa0", "#d55e00", "#4ba3db", "#8c8c1e", "#7a5cc7", "#a0522d", "#2f8f9d")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">")
INK, MUTED, GRID, PAPER = "#1f2328", "#6b7280", "#e3e6ea", "#ffffff"


class ReportConfig(JobConfig):
    root: Path = key(help="results/<tier>")
    seeds: tuple[int, ...] = key(help="seeds of the study", min_length=1)
    arms: tuple[str, ...] = key(help="SFT arms, in order", min_length=1)
    tasks: tuple[str, ...] = key(help="tasks on which arms are compared")

    def model_post_init(self, _context) -> None:
        for name in ("seeds", "arms", "tasks"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name} = {list(getattr(self, name))} names one of them twice; delete it")


class Artifacts:
    """The results of one tier. A reference is `<stage>/<method>/<variant>`, as in the configuration."""

    def __init__(self, job: ReportConfig) -> None:
        self.root, self.seeds, self.arms, self.tasks = job.root, job.seeds, job.arms, job.tasks
        self._manifests: dict[Path, Manifest] = {}
        self._rows: dict[Path, list[dict[str, Any]]] = {}

    # --- the study's shape ---

    @property
    def starts(self) -> tuple[str, ...]:
        """What RL starts from: the base, then the arms."""
        return (BASE, *self.arms)

    @staticmethod
    def checkpoints(start: str) -> tuple[str, str]:
        """Evaluation's names of a start before and after RL."""
        return (BASE if start == BASE else f"sft_{start}", f"rl_{start}")

    def colour(self, start: str) -> str:
        return MUTED if start == BASE else COLOURS[self.arms.index(start) % len(COLOURS)]

    def marker(self, start: str) -> str:
        return "o" if start == BASE else MARKERS[self.arms.index(start) % len(MARKERS)]

    # --- files ---

    def path(self, reference: str, seed: int) -> Path:
        return self.root / reference / f"seed{seed}" / manifest.NAME

    def available(self, references: Iterable[str]) -> bool:
        """False if not one of these jobs has a result. If some have one, all must: the reader of a missing one is told."""
        return any(self.path(reference, seed).is_file() for reference in references for seed in self.seeds)

    def evaluated(self, method: str, task: str) -> bool:
        return self.available(f"evaluate/{method}/{task}-{name}" for start in self.starts for name in self.checkpoints(start))

    def manifest(self, reference: str, seed: int) -> Manifest:
        return self.read(self.path(reference, seed))

    def read(self, path: Path) -> Manifest:
        """A manifest, without hashing the weights beside it: a report reads small files alone."""
        if path not in self._manifests:
            self._manifests[path] = manifest.read(path, verify=False)
        return self._manifests[path]

    def file(self, path: Path, name: str) -> Path:
        """A file that the manifest at `path` names, with the content that it records."""
        recorded, found = self.read(path).artifacts.get(name), path.parent / name
        if recorded is None:
            raise UserError(f"{path} names no {name}; delete it and run `snakemake {path}`.")
        if not found.is_file():
            raise UserError(f"{found} is missing, though {path} names it; delete the manifest and run `snakemake {path}`.")
        if manifest.sha256(found) != recorded.sha256:
            raise UserError(f"{found} differs from what {path} records; delete the manifest and run `snakemake {path}`.")
        return found

    def rows(self, path: Path, name: str) -> list[dict[str, Any]]:
        """Rows of a parquet file beside the manifest at `path`."""
        if path.parent / name not in self._rows:
            self._rows[path.parent / name] = tables.read(self.file(path, name))
        return self._rows[path.parent / name]

    # --- values per item, one array per seed ---

    def passes(self, task: str, checkpoint: str, k: int = 1) -> list[np.ndarray]:
        """pass@k of each item."""
        found = []
        for seed in self.seeds:
            rows = self.rows(self.path(f"evaluate/reasoning/{task}-{checkpoint}", seed), "items.parquet")
            found.append(pass_at_k([row["n"] for row in rows], [row["correct"] for row in rows], k))
        return found

    def nll(self, task: str, arm: str) -> list[np.ndarray]:
        """Negative log-likelihood of each validation trace after SFT, in nats."""
        return self._column(f"sft/train/{task}-{arm}", "validation.parquet", lambda row: row["nll"])

    def bits_per_byte(self, task: str, checkpoint: str) -> list[np.ndarray]:
        """Loss on each held-out document."""
        reference = f"evaluate/retention/{task}-{checkpoint}"
        return self._column(reference, "documents.parquet", lambda row: row["nll"] / row["bytes"] / math.log(2))

    def _column(self, reference: str, name: str, value) -> list[np.ndarray]:
        import numpy as np

        return [np.array([value(row) for row in self.rows(self.path(reference, seed), name)]) for seed in self.seeds]

    def curve(self, reference: str, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(steps [T], values [seeds, T]) of one key of history.jsonl at the steps that all seeds logged; None without it."""
        import numpy as np

        series = []
        for seed in self.seeds:
            history = read_history(self.file(self.path(reference, seed), "history.jsonl"))
            series.append({int(row["step"]): row[name] for row in history if name in row})
        steps = sorted(set.intersection(*map(set, series)))
        if not steps:
            return None
        return np.array(steps), np.array([[one[step] for step in steps] for one in series])

    def metric(self, reference: str, name: str) -> tuple[float, float | None] | None:
        """(mean over seeds, standard error) of a manifest's metric: over seeds, or the manifest's own with one seed."""
        import numpy as np

        found = [self.manifest(reference, seed).metrics.get(name) for seed in self.seeds]
        if None in found:
            return None
        if len(found) == 1:
            return found[0].value, found[0].se
        values = np.array([one.value for one in found])
        return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def interval(samples: list[np.ndarray], *, share: bool = False) -> Interval:
    """The ledger's bootstrap interval of a mean. `share`: cut to [0, 1], beyond which Student's quantile for few seeds may reach."""
    estimate, low, high = bootstrap(samples)
    return Interval(estimate, max(low, 0.0), min(high, 1.0)) if share else Interval(estimate, low, high)


def reachable(artifacts: Artifacts, roots: Iterable[Path]) -> list[Path]:
    """Manifests that the results at `roots` rest on, `roots` included, in order of path.

    Followed by the digests of inputs, so that results of an older configuration in the same folder are left out.
    """
    by_digest = {manifest.sha256(path): path for path in artifacts.root.glob(f"*/*/*/seed*/{manifest.NAME}")}
    found, queue = set(), [path for path in roots if path.is_file()]
    while queue:
        path = queue.pop()
        if path not in found:
            found.add(path)
            queue += [by_digest[digest] for digest in artifacts.read(path).inputs.values() if digest in by_digest]
    return sorted(found)
