"""Schedules of train-units on a world with planted prerequisites, and on one where units are all alike.

One job is one schedule on one world, with R replicates that are paired across schedules: replicate r has the same data, the same
initialisation and the same random orders whatever the schedule. World `chain`: units of one skill each, on R stacked nets.
World `iid`: units from one distribution, a small decoder per replicate through the Transformers trainer; a null check.
D3's formulas are our reconstruction, the paper's body was not readable (paper card d3, "Small-scale replication" 2 to 4).
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import numpy as np

from posttrain.core import cli, determinism, manifest, tables
from posttrain.core.config import JobConfig, key
from posttrain.core.determinism import derive
from posttrain.core.models import Shape
from posttrain.midtrain import worlds
from posttrain.midtrain.influence import EDGES, MOST_PAIRS, Influence, directions, measure, preconditioner
from posttrain.midtrain.ordering import kendall, satisfied
from posttrain.midtrain.schedules import DIRECTED, MIXTURE, Decision, Rule, Schedule, Scheduler, Seen


class Config(JobConfig):
    world: Literal["chain", "iid"] = key("chain", help="planted prerequisites, or units that are all alike")
    schedule: Schedule = key("random", help="who orders the units of a window")
    rule: Rule = key(Rule(), help="settings of the schedules")
    replicates: int = key(8, help="paired replicates", gt=1)
    skills: int = key(5, help="skills, and units per window", gt=1)
    symbols: int = key(5, help="symbols of an operand", gt=1)
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
        if self.world == "iid" and self.schedule in MIXTURE:
            raise ValueError("a mixture needs several domains and the world iid has one; choose the world chain")

    @property
    def steps(self) -> int:
        return self.windows * self.skills * self.steps_per_unit

    def rate(self, step: int) -> float:
        """Learning rate of a step (0, 1, ...): constant, then linear to 0."""
        last = round(self.decay * self.steps)
        return self.learning_rate * min(1.0, (self.steps - step) / (last + 1))


class Corpus(NamedTuple):
    """Chain data of all replicates. Unit w K + k is skill k's in window w."""

    train: worlds.Rows  # [R, units, rows, ...]
    probe: worlds.Rows  # [R, units, micro, probe_rows, ...]
    validation: worlds.Rows  # [R, validation, ...]
    windows: list[list[int]]
    skill: list[int]  # of each unit


class Trace(NamedTuple):
    """What one run of all replicates leaves."""

    curves: list[dict[str, Any]]
    decisions: list[list[Decision]]  # per replicate
    measured: list[tuple[int, int, str, Influence]]  # (replicate, window, edge, matrices), as measured, before averaging
    probe_seconds: float
    train_seconds: float
    flops_share: float  # of looking, relative to training


def corpus(job: Config) -> Corpus:
    found = [worlds.squares(job.seed, r, job.skills, job.symbols) for r in range(job.replicates)]
    units = job.windows * job.skills
    return Corpus(
        worlds.stacked(job.seed, "train", found, (units, job.steps_per_unit * job.batch_size)),
        worlds.stacked(job.seed, "probe", found, (units, job.micro, job.probe_rows)),
        worlds.stacked(job.seed, "validation", found, (job.validation,)),
        np.arange(units).reshape(job.windows, job.skills).tolist(),
        [u % job.skills for u in range(units)],
    )


def domain(skill: int) -> str:
    return f"skill{skill + 1:02}"


def planted(skills: int) -> np.ndarray:
    """Skill-It's graph of the chain: 1 on the diagonal, 0.5 from each skill to the next."""
    return np.eye(skills) + 0.5 * np.eye(skills, k=1)


class Looker:
    """What the schedules see of the stacked nets."""

    def __init__(self, job: Config, data: Corpus, net: worlds.Net, optimizer: Any) -> None:
        self.job, self.data, self.net, self.optimizer, self.work = job, data, net, optimizer, 0.0

    def losses_of(self, rows: worlds.Rows, skill: list[int]) -> Any:
        """Mean loss of unit batches, rows [R, U, B, ...], one skill each: tensor [R, U]."""
        import torch

        R, U, B, _ = rows.operands.shape
        operands, answers = (torch.from_numpy(x.reshape(R, U * B, -1)) for x in rows)
        which = torch.tensor(skill).repeat_interleave(B).expand(R, -1)
        return self.net.losses(operands, answers, which).view(R, U, B).mean(2)

    def gradient_loss(self, units: list[int], i: int, m: int) -> Any:
        size = min(self.job.batch_size, self.data.train.operands.shape[2] // self.job.micro)
        rows = worlds.Rows(*(x[:, units[i], None, m * size : (m + 1) * size] for x in self.data.train))
        self.work += 3 * size
        return self.losses_of(rows, [self.data.skill[units[i]]])[:, 0]

    def probe_losses(self, units: list[int], m: int) -> Any:
        self.work += len(units) * self.job.probe_rows
        return self.losses_of(worlds.Rows(*(x[:, units, m] for x in self.data.probe)), [self.data.skill[u] for u in units])

    def influence(self, units: list[int], edge: str, rate: float) -> Influence:
        return measure(
            self.net.parameters,
            lambda i, m: self.gradient_loss(units, i, m),
            lambda m: self.probe_losses(units, m),
            units=len(units),
            micro=self.job.micro,
            step=self.job.rule.lookahead * rate,
            edge=edge,
            scale=preconditioner(self.optimizer, self.net.parameters) if self.job.rule.precondition else None,
        )

    def look(self, schedulers: list[Scheduler], window: int, rate: float) -> tuple[list[Seen], Influence | None]:
        """What each replicate's scheduler sees, and the fresh influence of all replicates if any of them was due."""
        import torch

        need, units = schedulers[0].needs(window), schedulers[0].probed(window)
        if need is None:
            return [Seen()] * len(schedulers), None
        if need == "gradients":
            parts = [directions(self.gradient_loss(units, i, 0), self.net.parameters, None, False)[0] for i in range(len(units))]
            flat = torch.stack([torch.cat([g.flatten(1) for g in one], 1) for one in parts], 1).double().numpy()
            return [Seen(gradients=g) for g in flat], None
        with torch.no_grad():
            losses = torch.stack([self.probe_losses(units, m) for m in range(self.job.micro)]).double().mean(0).numpy()
        due = [s.due(x) for s, x in zip(schedulers, losses, strict=True)]
        if not any(due):
            return [Seen(x) for x in losses], None
        found = self.influence(units, self.job.rule.edge, rate)
        seen = [Seen(x, Influence(*(v[r] for v in found)) if due[r] else None) for r, x in enumerate(losses)]
        return seen, found


def train_chain(job: Config, data: Corpus, schedulers: list[Scheduler]) -> Trace:
    """Train all replicates, each by its own scheduler."""
    import torch

    net = worlds.Net(job.seed, job.replicates, job.skills, job.symbols, job.width, job.hidden)
    optimizer = torch.optim.AdamW(net.parameters, lr=job.learning_rate, weight_decay=0.0)
    looker, step = Looker(job, data, net, optimizer), 0
    curves, measured, decisions = [], [], [[] for _ in schedulers]
    seconds = {"probe": 0.0, "train": 0.0}
    index = np.arange(job.replicates)

    def point() -> None:
        loss, right = net.score(data.validation)
        curves.extend(curve_row(r, step, loss[r], right[r]) for r in range(job.replicates))

    point()
    for window in range(job.windows):
        started = time.perf_counter()
        seen, fresh = looker.look(schedulers, window, job.rate(step))
        for r, scheduler in enumerate(schedulers):
            decisions[r].append(scheduler.decide(window, seen[r]))
        seconds["probe"] += time.perf_counter() - started
        if fresh is not None:
            measured += [(r, window, job.rule.edge, Influence(*(v[r] for v in fresh))) for r in index if seen[r].influence]
        if window in job.diagnose and job.schedule in DIRECTED:
            work = looker.work
            for edge in (e for e in EDGES if e != job.rule.edge and (e != "pair_exact" or job.skills <= MOST_PAIRS)):
                other = looker.influence(data.windows[window], edge, job.rate(step))
                measured += [(r, window, edge, Influence(*(v[r] for v in other))) for r in index]
            looker.work = work
        for slot in range(job.skills):
            units = np.array([found[-1].order[slot] for found in decisions])
            skill = torch.tensor([data.skill[u] for u in units])[:, None].expand(-1, job.batch_size)
            for part in range(job.steps_per_unit):
                started = time.perf_counter()
                rows = slice(part * job.batch_size, (part + 1) * job.batch_size)
                operands, answers = (torch.from_numpy(x[index, units, rows]) for x in data.train)
                optimizer.param_groups[0]["lr"] = job.rate(step)
                optimizer.zero_grad()
                net.losses(operands, answers, skill).mean(1).sum().backward()
                optimizer.step()
                step += 1
                seconds["train"] += time.perf_counter() - started
                if step % job.evaluate_every == 0 or step == job.steps:
                    point()
    share = looker.work / (3 * job.batch_size * job.steps)
    return Trace(curves, decisions, measured, seconds["probe"], seconds["train"], share)


def curve_row(replicate: int, step: int, loss: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """One point of curves.parquet: losses in nats and accuracies per skill (1, 2, ...)."""
    row: dict[str, Any] = {"replicate": int(replicate), "step": step, "loss": float(loss.mean())}
    row |= {f"loss_{k + 1}": float(x) for k, x in enumerate(loss)}
    return row | {f"accuracy_{k + 1}": float(x) for k, x in enumerate(right)}


def chain(job: Config) -> Trace:
    """The chain under the job's schedule. DoReMi first trains a reference on the uniform mixture and a proxy whose average
    weights the run itself then uses; the seconds of both count as probing, and so do their FLOPs."""
    data = corpus(job)
    domains = [domain(k) for k in data.skill]

    def schedulers(name: Schedule, **more: Any) -> list[Scheduler]:
        extra = [{k: v[r] for k, v in more.items()} for r in range(job.replicates)]
        graph = planted(job.skills) if name == "skill_it" else None
        seeds = [derive(job.seed, "replicate", r) for r in range(job.replicates)]
        return [Scheduler(name, job.rule, data.windows, domains, s, graph=graph, **e) for s, e in zip(seeds, extra, strict=True)]

    if job.schedule != "doremi":
        return train_chain(job, data, schedulers(job.schedule))
    reference = train_chain(job, data, schedulers("random"))
    last = [[row[f"loss_{k + 1}"] for k in range(job.skills)] for row in reference.curves[-job.replicates :]]
    online = schedulers("doremi", reference=np.array(last))
    proxy = train_chain(job, data, online)
    found = train_chain(job, data, schedulers("doremi", weights=[np.mean(s.weights[1:], 0) for s in online]))
    return found._replace(
        probe_seconds=found.probe_seconds + sum(t.train_seconds + t.probe_seconds for t in (reference, proxy)),
        flops_share=found.flops_share + proxy.flops_share + 2.0,
    )


def iid(job: Config) -> Trace:
    """Units of one distribution: every row asks for a skill of its own. One Trainer run per replicate."""
    from posttrain.midtrain import decoder

    runs = [decoder.train(job, replicate) for replicate in range(job.replicates)]
    return Trace(
        [row for run in runs for row in run.curves],
        [run.decisions for run in runs],
        [item for run in runs for item in run.measured],
        sum(run.probe_seconds for run in runs),
        sum(run.train_seconds for run in runs),
        float(np.mean([run.flops_share for run in runs])),
    )


def live_pairs(D: np.ndarray, losses: np.ndarray, symbols: int) -> tuple[list[bool], list[bool]]:
    """Whether D[k - 1, k] > 0, for adjacent pairs of skills: (all pairs, those whose skill k is above half of log m)."""
    hits = [bool(D[k - 1, k] > 0) for k in range(1, len(D))]
    return hits, [hit for k, hit in enumerate(hits, 1) if losses[k] > np.log(symbols) / 2]


def replicate_row(job: Config, trace: Trace, r: int) -> dict[str, Any]:
    """One row of replicates.parquet; None where a column has no meaning for the schedule or the world."""
    curve = [row for row in trace.curves if row["replicate"] == r]
    last, top = curve[-1], f"accuracy_{job.skills}"
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
    trace = chain(job) if job.world == "chain" else iid(job)
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
    names = [n for n, v in rows[0].items() if isinstance(v, int | float) and n != "replicate"]
    metrics = {name: manifest.metric([row[name] for row in rows if row[name] is not None]) for name in names}
    manifest.publish(
        job, metrics, files, not_deterministic="probe_seconds and train_seconds of replicates.parquet are wall times"
    )


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
