"""TAD's two constants on known sources: every K with every beta, at one learning rate, otherwise as `distill/known`.

The rate is the same in all cells and was chosen on none of them. Of replicate r the source, sequences and initialisation are those
of `distill/known`.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, determinism, manifest, tables
from posttrain.core.config import key
from posttrain.distill import known
from posttrain.distill import source as sources
from posttrain.distill.formulas import Divergence


class Config(known.Setup):
    heads_k: list[int] = key([1, 5, 10, 20], help="values of K", min_length=1)
    betas: list[float] = key([0.5, 1.0, 2.0, 5.0, 10.0], help="values of beta", min_length=1)
    common_rate: float = key(2e-3, help="learning rate of every cell", gt=0)
    source: Path = key(help="manifest of the known sources", role="input")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    found = sources.read(job.source)
    known.check_sources(job, found)
    runs = [(r, job.common_rate) for r in range(job.replicates)]
    cells = [(k, beta, Divergence(kind="tad", k=k, beta=beta)) for k in job.heads_k for beta in job.betas]
    table = []
    for k, beta, divergence in [*cells, (0, 0.0, Divergence(kind="kl"))]:  # the last row is plain KL
        weights, norms = known.train(job, divergence, found, runs)
        rows = known.judge(job, weights, found, runs, "test")
        for (r, _), row, norm in zip(runs, rows, norms.tolist(), strict=True):
            row.pop("masses")
            table.append({"kind": divergence.kind, "k": k, "beta": beta, "replicate": r, **row, "grad_norm": norm})
    file = tables.write(table, job.folder / "grid.parquet")
    best = {}
    for k, beta, _ in cells:
        best[k, beta] = (
            sum(row["kl"] for row in table if (row["kind"], row["k"], row["beta"]) == ("tad", k, beta)) / job.replicates
        )
    lowest = min(best, key=best.get)
    plain = [row["kl"] for row in table if row["kind"] == "kl"]
    measured = {"kl/plain": manifest.metric(plain), "kl/best": best[lowest], "best_k": lowest[0], "best_beta": lowest[1]}
    manifest.publish(job, measured, [file])


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
