"""Known sources: random order-1 token processes, which serve as exact teachers.

The next token after i has the logits scale x (E W)_i - log rank, with E [V, factors] and W [factors, V] standard Gaussian and
`rank` a random permutation of 1..V, the same for every i: Zipf's law under a context of low rank. Mean tail mass beyond the
ten most likely tokens is about 0.14 (paper card tail-kd, "Small-scale replication"). One job draws several sources, one per
replicate and one more for choosing learning rates.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core import cli, determinism, manifest
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive

if TYPE_CHECKING:
    from torch import Tensor


class Config(JobConfig):
    vocabulary: int = key(256, help="tokens", gt=12)
    factors: int = key(12, help="rank of the context's part", gt=0)
    scale: float = key(0.9, help="size of the context's part", ge=0)
    count: int = key(6, help="sources; the last one is for choosing learning rates", gt=1)


def logits(job: Config, number: int) -> Tensor:
    """Row i: logits of the token after token i; float32 [V, V]."""
    import torch

    generator = torch.Generator().manual_seed(derive(job.seed, "source", number))
    v = job.vocabulary
    context = torch.randn(v, job.factors, generator=generator) @ torch.randn(job.factors, v, generator=generator)
    rank = torch.randperm(v, generator=generator) + 1
    return job.scale * context - rank.float().log()


def draw(table: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """Sequences of a source [V, V]: int64 [rows, length + 1], the first token uniform."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    sums = table.double().softmax(-1).cumsum(-1)
    tokens = torch.empty(rows, length + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(len(table), (rows,), generator=generator)
    uniform = torch.rand(length, rows, 1, dtype=torch.float64, generator=generator)
    for t in range(length):
        at = torch.searchsorted(sums[tokens[:, t]], uniform[t])[:, 0]
        tokens[:, t + 1] = at.clamp(max=len(table) - 1)  # the last sum may be a little below 1
    return tokens


def read(path: Path) -> Tensor:
    """Logits float32 [count, V, V] of a source manifest."""
    from safetensors.torch import load_file

    manifest.read(path)
    return load_file(path.parent / "sources.safetensors")["logits"]


def main(job: Config) -> None:
    determinism.setup(job.seed)
    import torch
    from safetensors.torch import save_file

    tables = torch.stack([logits(job, number) for number in range(job.count)])
    file = job.folder / "sources.safetensors"
    save_file({"logits": tables}, file)
    measured = []
    for number, table in enumerate(tables):
        seen = draw(table, 256, 32, derive(job.seed, "look", number))[:, :-1].reshape(-1)
        p = table[seen].double().softmax(-1)
        tail = 1 - p.topk(10, -1).values.sum(-1)  # of a description; losses never subtract
        measured.append((float(tail.mean()), float(-(p * p.clamp(min=1e-300).log()).sum(-1).mean())))
    metrics = {"tail_mass": manifest.metric([m[0] for m in measured]), "entropy": manifest.metric([m[1] for m in measured])}
    manifest.publish(job, metrics, [file])


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
