"""The world `chain`: training of stacked nets, each replicate under its own scheduler, and what the schedulers see.

Source: paper card d3, "Small-scale replication" 2 and 4; D3's formulas are our reconstruction, the paper's body was not readable.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.core.determinism import derive
from posttrain.midtrain import worlds
from posttrain.midtrain.influence import EDGES, MOST_PAIRS, Influence, directions, measure, preconditioner
from posttrain.midtrain.schedules import DIRECTED, Schedule, Scheduler, Seen
from posttrain.midtrain.worlds import Trace, curve_row

if TYPE_CHECKING:
    from posttrain.midtrain.d3 import Config


class Corpus(NamedTuple):
    """Chain data of all replicates. Unit w K + k is skill k's in window w."""

    train: worlds.Rows  # [R, units, rows, ...]
    probe: worlds.Rows  # [R, units, micro, probe_rows, ...]
    validation: worlds.Rows  # [R, validation, ...]
    windows: list[list[int]]
    skill: list[int]  # of each unit


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


def run(job: Config) -> Trace:
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
