"""Schedules of train-units on a world with planted prerequisites, and on one where units are all alike.

One job is one schedule on one world, with R replicates that are paired across schedules: replicate r has the same data, the same
initialisation and the same random orders whatever the schedule. World `chain`: units of one skill each, on R stacked nets.
World `iid`: units from one distribution, a small decoder per replicate through the Transformers trainer; a null check.
D3's formulas are our reconstruction, the paper's body was not readable (paper card d3, "Small-scale replication" 2 to 4).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from posttrain.core import cli, determinism, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.models import Shape
from posttrain.midtrain import chain
from posttrain.midtrain.ordering import kendall, satisfied
from posttrain.midtrain.schedules import MIXTURE, Rule, Schedule, Scheduler
from posttrain.midtrain.worlds import Trace


class Config(JobConfig):
    world: Literal["chain", "iid"] = key("chain", help="planted prerequisites, or units that are all alike")
    schedule: Schedule = key("random", help="who orders the units of a window")
    rule: Rule = key(Rule(), help="settings of the schedules")
    replicates: int = key(8, help="paired replicates", gt=1)
    skills: int = key(5, help="skills, and units per window", gt=1)
    symbols: int = key(5, help="symbols of an operand", gt=1)
    asked: int = key(2, help="rows ask for one of the first skills, this many (iid)", gt=0)
    windows: int = key(10, help="windows of one unit per skill", gt=0)
    steps_per_unit: int = key(20, help="optimizer steps of a unit", gt=0)
    batch_size: int = key(64, help="rows per optimizer step", gt=0)
    learning_rate: float = key(3e-3, help="peak learning rate of AdamW", gt=0)
    decay: float = key(0.2, help="share of the steps, at the end, over which the learning rate falls to 0", ge=0, le=1)
    width: int = key(48, help="state of a stacked net (chain)", gt=0)
    hidden: int = key(96, help="hidden layer of its blocks (chain)", gt=0)
    shape: Shape = key(Shape(hidden=32, layers=1, heads=2, intermediate=64, context=16), help="the decoder (iid)")
    micro: int = key(4, help="micro-batches per unit for influence, each with train rows and probe rows of its own", gt=1)
    probe_rows: int = key(32, help="probe rows of a unit in one micro-batch, never trained on", gt=0)
    validation: int = key(256, help="validation rows", gt=1)
    evaluate_every: int = key(10, help="optimizer steps between points of the curves", gt=0)
    diagnose: list[int] = key([], help="windows in which all definitions of influence are measured (chain, d3); not timed")

    def model_post_init(self, _context) -> None:
        if self.steps_per_unit * self.batch_size < self.micro:
            raise ValueError("a unit has fewer rows than micro; raise steps_per_unit or batch_size, or lower micro")
        if self.asked > self.skills:
            raise ValueError(f"asked {self.asked} is more than skills {self.skills}; lower asked")
        if self.world == "iid" and self.schedule in MIXTURE:
            raise ValueError("a mixture needs several domains and the world iid has one; choose the world chain")

    @property
    def top(self) -> int:
        """The last skill that is measured, from 1."""
        return self.skills if self.world == "chain" else self.asked

    @property
    def steps(self) -> int:
        return self.windows * self.skills * self.steps_per_unit

    def rate(self, step: int) -> float:
        """Learning rate of a step (0, 1, ...): constant, then linear to 0."""
        last = round(self.decay * self.steps)
        return self.learning_rate * min(1.0, (self.steps - step) / (last + 1))


def iid(job: Config) -> Trace:
    """Units of one distribution: every row asks for a skill of its own. One Trainer run per replicate."""
    from posttrain.midtrain import decoder

    runs = [decoder.train(job, replicate) for replicate in range(job.replicates)]
    return Trace(
        [row for run in runs for row in run.curves],
        [run.decisions[0] for run in runs],
        [item for run in runs for item in run.measured],
        sum(run.probe_seconds for run in runs),
        sum(run.train_seconds for run in runs),
        float(np.mean([run.flops_share for run in runs])),
    )


def live_pairs(D: np.ndarray, losses: np.ndarray, symbols: int) -> tuple[list[bool], list[bool]]:
    """Whether D[k - 1, k] > 0, for adjacent pairs of skills: (all pairs, those whose skill k is above half of log m)."""
    hits = [bool(D[k - 1, k] > 0) for k in range(1, len(D))]
    return hits, [hit for k, hit in enumerate(hits, 1) if losses[k] > np.log(symbols) / 2]


def nominal(job: Config) -> float:
    """Share of edges above z standard errors if nothing differs: one tail of Student's t with micro - 1 degrees of freedom."""
    from scipy.stats import t

    return float(t.sf(job.rule.z, job.micro - 1))


def replicate_row(job: Config, trace: Trace, r: int) -> dict[str, Any]:
    """One row of replicates.parquet; None where a column has no meaning for the schedule or the world."""
    curve = [row for row in trace.curves if row["replicate"] == r]
    last, top = curve[-1], f"accuracy_{job.top}"
    reached = next((row["step"] for row in curve if row[top] >= 0.9), None)
    decisions = trace.decisions[r]
    used = [np.reshape(d.influence["D"], (job.skills, job.skills)) for d in decisions if d.influence]
    positions = [[u % job.skills for u in d.order] for d in decisions]
    scheduler = Scheduler(
        "random", job.rule, [list(range(job.skills))] * job.windows, [""] * job.skills, derive(job.seed, "replicate", r)
    )
    row: dict[str, Any] = {"world": job.world, "schedule": job.schedule, "replicate": r, "loss": last["loss"]}
    row |= {name: last[name] for name in last if name.startswith("loss_")} | {"accuracy_top": last[top]}
    row |= {"steps_to_90": reached if reached is not None else job.steps, "censored": reached is None}
    row["area"] = float(np.trapezoid([x["loss"] for x in curve], [x["step"] for x in curve]) / last["step"])
    pairs = [
        live_pairs(found.D, found.losses, job.symbols)
        for replicate, _, edge, found in trace.measured
        if replicate == r and edge == job.rule.edge and job.world == "chain"
    ]
    everywhere, live = ([hit for pair in pairs for hit in pair[k]] for k in (0, 1))
    row["direction"] = float(np.mean(everywhere)) if everywhere else None
    row["direction_live"] = float(np.mean(live)) if live else None
    row["edges_above"] = float(np.mean([d.above for d in decisions])) if used else None
    row["edge_rate"] = row["edges_above"] / (job.skills * (job.skills - 1)) if used else None
    row["edge_nominal"] = nominal(job) if used and job.world == "iid" else None
    row["fell_back"] = float(np.mean([d.fell_back for d in decisions])) if used else None
    row["satisfied"] = float(np.mean([satisfied(D, p) for D, p in zip(used, positions, strict=True)])) if used else None
    order_only = job.schedule not in MIXTURE
    row["kendall_random"] = (
        float(np.mean([kendall(p, scheduler.random(w)) for w, p in enumerate(positions)])) if order_only else None
    )
    row |= {"probe_seconds": trace.probe_seconds / job.replicates, "train_seconds": trace.train_seconds / job.replicates}
    return row | {"flops_share": trace.flops_share}


def main(job: Config) -> None:
    determinism.setup(job.seed)
    trace = chain.run(job) if job.world == "chain" else iid(job)
    rows = [replicate_row(job, trace, r) for r in range(job.replicates)]
    orders = [
        {"replicate": r, **{name: value for name, value in d._asdict().items() if name != "influence"}}
        for r, decisions in enumerate(trace.decisions)
        for d in decisions
    ]
    matrices = [
        {"replicate": int(r), "window": w, "edge": edge, "i": i, "j": j}
        | {name: float(getattr(found, name)[i, j]) for name in ("A", "se", "D", "se_D")}
        for r, w, edge, found in trace.measured
        for i in range(job.skills)
        for j in range(job.skills)
    ]
    tabled = {"replicates": rows, "orders": orders, "curves": trace.curves}
    if matrices:
        tabled["influence"] = matrices
    files = [tables.write(values, job.folder / f"{name}.parquet") for name, values in tabled.items()]
    names = [n for n in rows[0] if n != "replicate" and any(isinstance(row[n], int | float) for row in rows)]
    metrics = {name: manifest.metric([row[name] for row in rows if row[name] is not None]) for name in names}
    manifest.publish(
        job,
        metrics,
        files,
        card={"formulas": "our reconstruction of D3; the paper's body was not readable"},
        not_deterministic="probe_seconds and train_seconds of replicates.parquet are wall times",
    )


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
