"""The sampler that gives a schedule's rows to any Hugging Face Trainer, and what the schedule sees of that Trainer's model.

Parameters, optimizer, random state and modes are bit for bit unchanged by looking. Source of the schedules: paper card d3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.core import tables
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.midtrain import influence
from posttrain.midtrain.influence import directions, measure, preconditioner, untouched
from posttrain.midtrain.schedules import Decision, Scheduler, Seen

if TYPE_CHECKING:
    import torch


class Unit(NamedTuple):
    """Rows of the data set by number. `probe` rows are never trained on."""

    rows: tuple[int, ...]  # in training order, whole optimizer steps
    probe: tuple[int, ...] = ()
    domain: str = ""


def broadcast(value: Any) -> Any:
    """Rank 0's value on every rank; the value itself outside a process group."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


class WindowSampler:
    """Row numbers for a DataLoader, window after window; give it to :func:`install`.

    When is an order decided? Accelerate's loader holds one micro-batch in reserve, so a window's first row is asked for one
    micro-batch before it is trained on, that is with the parameters before the last optimizer step of the window before (and
    2 x `workers` micro-batches earlier still, with loader processes). The first window is decided before any step.

    look(scheduler, window) -> Seen measures; it is called on rank 0 alone, the others take rank 0's decision. store: parquet
    file with every decision so far, written by rank 0 before the first row is given out; decisions found there are replayed
    and not measured again. seconds, work: wall time of looking, and its cost in forward passes of one row (backward: 2).
    """

    def __init__(self, scheduler: Scheduler, units: Sequence[Unit], store: Path | None = None) -> None:
        self.scheduler, self.units, self.store = scheduler, units, store
        self.look: Callable[[Scheduler, int], Seen] | None = None
        self.decisions: list[Decision] = []
        self.seconds, self.work = 0.0, 0.0
        sizes = {len(units[u].rows) for w in scheduler.windows for u in w}
        if len(sizes) != 1:
            raise UserError(f"the units have {sorted(sizes)} rows; a schedule needs units of one size.")
        self.length = sum(len(w) for w in scheduler.windows) * sizes.pop()
        self.stored: list[Decision] | None = None

    def _read(self) -> tuple[list[Decision], float, float]:
        if self.store is None or not self.store.is_file():
            return [], 0.0, 0.0
        rows = sorted(tables.read(self.store), key=lambda row: row["window"])
        found = [Decision(**{name: row[name] for name in Decision._fields}) for row in rows]
        return found, rows[-1]["seconds"], rows[-1]["work"]

    def decide(self, window: int) -> Decision:
        """This window's decision: made already, stored, or measured now and broadcast."""
        if self.stored is None:
            self.stored, self.seconds, self.work = broadcast(self._read())
        while len(self.decisions) <= window:
            w = len(self.decisions)
            decision = self.scheduler.replay(self.stored[w]) if w < len(self.stored) else self._new(w)
            self.decisions.append(decision)
        return self.decisions[window]

    def _new(self, window: int) -> Decision:
        import torch

        started = time.perf_counter()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        first = not distributed or torch.distributed.get_rank() == 0
        mine = self.scheduler.decide(window, self.look(self.scheduler, window) if self.look else Seen()) if first else None
        decision = broadcast(mine)
        if not first:
            self.scheduler.replay(decision)
        self.seconds += time.perf_counter() - started
        if first and self.store is not None:
            rows = [{**d._asdict(), "seconds": self.seconds, "work": self.work} for d in [*self.decisions, decision]]
            tables.write(rows, self.store)
        return decision

    def __iter__(self) -> Iterator[int]:
        for window in range(len(self.scheduler.windows)):
            for u in self.decide(window).order:
                yield from self.units[u].rows

    def __len__(self) -> int:
        return self.length


def row_losses(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(negative log-likelihood in nats, number of target tokens) per row of a batch with `labels`, float32 and int64 [B]."""
    import torch

    from posttrain.core.logprobs import token_logprobs

    labels = batch["labels"][:, 1:]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.autocast(labels.device.type, enabled=False):
        logits = model(**inputs, use_cache=False).logits[:, :-1]
    valid = labels != -100
    logp = token_logprobs(logits, labels.clamp_min(0))
    return -torch.where(valid, logp, 0.0).sum(1), valid.sum(1)


class TrainerLook:
    """Measures for a :class:`WindowSampler` what its schedule needs, on the model and optimizer of a Trainer.

    A unit's train half is cut into `micro` parts of which the first `rows` rows count, its probe half into `micro` whole parts.
    """

    def __init__(self, trainer: Any, sampler: WindowSampler, micro: int, rows: int) -> None:
        if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
            raise UserError("a schedule that probes the model needs whole parameters on each process; set deepspeed: null.")
        self.trainer, self.sampler, self.micro, self.rows = trainer, sampler, micro, rows

    def parts(self, rows: Sequence[int], least: str) -> list[list[int]]:
        if len(rows) < self.micro:
            raise UserError(f"a unit has {len(rows)} {least} rows for {self.micro} micro-batches; lower micro or give it more.")
        return [part.tolist() for part in np.array_split(np.asarray(rows), self.micro)]

    def losses_of(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses per row of the training data set, by number."""
        trainer = self.trainer
        batch = trainer.data_collator([trainer.train_dataset[int(i)] for i in rows])
        batch = {name: value.to(trainer.model.device) for name, value in batch.items()}
        return row_losses(trainer.accelerator.unwrap_model(trainer.model), batch)

    def __call__(self, scheduler: Scheduler, window: int) -> Seen:
        import torch

        need = scheduler.needs(window)
        if need is None:
            return Seen()
        units = [self.sampler.units[u] for u in scheduler.probed(window)]
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        parameters = [p for p in model.parameters() if p.requires_grad]

        def gradient_loss(i: int, m: int) -> torch.Tensor:
            rows = self.parts(units[i].rows, "train")[m][: self.rows]
            self.sampler.work += 3 * len(rows)
            total, count = self.losses_of(rows)
            return (total.sum() / count.sum()).reshape(1)

        def probe_losses(m: int) -> torch.Tensor:
            parts = [self.parts(unit.probe, "probe")[m] for unit in units]
            self.sampler.work += sum(map(len, parts))
            total, count = self.losses_of([row for part in parts for row in part])
            sizes = [len(part) for part in parts]
            means = [t.sum() / c.sum() for t, c in zip(total.split(sizes), count.split(sizes), strict=True)]
            return torch.stack(means)[None]

        def gradients() -> np.ndarray:
            found = [directions(gradient_loss(i, 0), parameters, None, False)[0] for i in range(len(units))]
            return torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in found]).double().cpu().numpy()

        with untouched([], model):
            if need == "gradients":
                return Seen(gradients=gradients())
            with torch.no_grad():
                losses = torch.stack([probe_losses(m) for m in range(self.micro)]).double().mean(0)[0].cpu().numpy()
        if not scheduler.due(losses):
            return Seen(losses)
        rule, optimizer = scheduler.rule, self.trainer.optimizer
        rate = optimizer.param_groups[0]["lr"] or self.trainer.args.learning_rate  # 0 before the first step of a warm-up
        labels = np.arange(len(units))
        if rule.representatives is not None and rule.representatives < len(units):
            with untouched([], model):
                features = influence.project(gradients(), rule.projection, derive(scheduler.seed, "projection"))
            labels, chosen = influence.representatives(features, rule.representatives, derive(scheduler.seed, "clusters", window))
            units = [units[k] for k in chosen]
        found = measure(
            parameters,
            gradient_loss,
            probe_losses,
            units=len(units),
            micro=self.micro,
            step=rule.lookahead * rate,
            edge=rule.edge,
            scale=preconditioner(optimizer, parameters) if rule.precondition else None,
            module=model,
        )
        matrices = [influence.expand(value[0], labels) for value in found[:-1]]  # within a cluster no edge is above tau
        return Seen(losses, influence.Influence(*matrices, losses))


def install(trainer: Any, sampler: WindowSampler, *, micro: int, rows: int) -> WindowSampler:
    """Make a Trainer take its rows from the sampler. micro: micro-batches per unit for probing; rows: train rows in each.

    The units of the sampler must hold whole optimizer steps: order inside a step means nothing. Raises UserError otherwise.
    """
    per_step = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size
    size = len(sampler.units[sampler.scheduler.windows[0][0]].rows)
    if size % per_step:
        raise UserError(f"a unit has {size} rows and an optimizer step takes {per_step}; make units of whole steps.")
    sampler.look = TrainerLook(trainer, sampler, micro, rows)
    trainer._get_train_sampler = lambda *_: sampler
    return sampler
