"""One replicate of the world `iid`: a small decoder, the Transformers trainer, and the sampler of a schedule."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.core import models
from posttrain.core.determinism import derive
from posttrain.midtrain import worlds
from posttrain.midtrain.sampler import Unit, WindowSampler, install, row_losses
from posttrain.midtrain.schedules import Scheduler, Seen
from posttrain.midtrain.worlds import Trace, curve_row

if TYPE_CHECKING:
    from posttrain.midtrain.d3 import Config


class Data(NamedTuple):
    rows: list[dict]  # token rows by number: train rows of all units, then their probe rows
    units: list[Unit]
    validation: list[list[dict]]  # per skill


def data(job: Config, replicate: int, vocabulary: worlds.Vocabulary) -> Data:
    """Units whose rows ask for one of the first skills, drawn at random: all from one distribution."""
    count, probes = job.windows * job.skills, job.micro * job.probe_rows
    size = job.steps_per_unit * job.batch_size
    rng = np.random.default_rng(derive(job.seed, "iid", replicate))
    found = worlds.draw(rng, worlds.squares(job.seed, replicate, job.skills, job.symbols), (count * (size + probes),))
    rows = worlds.sequences(found, rng.integers(job.asked, size=len(found.operands)), vocabulary)
    held = worlds.draw(rng, worlds.squares(job.seed, replicate, job.skills, job.symbols), (job.validation,))
    first = count * size
    units = [
        Unit(tuple(range(u * size, (u + 1) * size)), tuple(range(first + u * probes, first + (u + 1) * probes)))
        for u in range(count)
    ]
    each = [worlds.sequences(held, np.full(job.validation, k), vocabulary) for k in range(job.asked)]
    return Data(rows, units, each)


def train(job: Config, replicate: int) -> Trace:
    """Train and measure one replicate; initialisation, data and random orders follow from the seed and its number alone."""
    import torch
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

    vocabulary = worlds.Vocabulary(job.skills, job.symbols)
    world = data(job, replicate, vocabulary)
    set_seed(derive(job.seed, "decoder", replicate) % 2**31)
    model = models.scratch(job.shape, vocabulary)
    windows = np.arange(len(world.units)).reshape(job.windows, job.skills).tolist()
    scheduler = Scheduler(job.schedule, job.rule, windows, [""] * len(world.units), derive(job.seed, "replicate", replicate))
    sampler = WindowSampler(scheduler, world.units)
    curves, measured, spent = [], [], 0.0
    batches = [{name: torch.stack([row[name] for row in rows]) for name in rows[0]} for rows in world.validation]

    def point(step: int) -> None:
        nonlocal spent
        started, mode = time.perf_counter(), model.training
        model.eval()
        loss, right = [], []
        with torch.no_grad():
            for k, batch in enumerate(batches):
                total, count = row_losses(model, batch)
                loss.append(float(total.double().sum() / count.sum()))
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
                right.append(float((logits[:, k + 1].argmax(-1) == batch["input_ids"][:, k + 2]).double().mean()))
        model.train(mode)
        curves.append(curve_row(replicate, step, np.array(loss), np.array(right)))
        spent += time.perf_counter() - started

    class Curve(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % job.evaluate_every == 0 or state.global_step == job.steps:
                point(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=job.batch_size,
            max_steps=job.steps,
            learning_rate=job.learning_rate,
            lr_scheduler_type="constant",
            seed=derive(job.seed, "trainer", replicate) % 2**31,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=world.rows, callbacks=[Curve()])
        trainer.remove_callback(PrinterCallback)
        trainer.create_scheduler = lambda num_training_steps, optimizer=None: decaying(
            trainer, optimizer or trainer.optimizer, job
        )
        look = install(trainer, sampler, micro=job.micro, rows=job.batch_size).look

        def noted(asking: Scheduler, window: int) -> Seen:
            seen = look(asking, window)
            if seen.influence is not None:
                measured.append((replicate, window, job.rule.edge, seen.influence))
            return seen

        sampler.look = noted
        point(0)
        spent, started = 0.0, time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started - spent - sampler.seconds
    share = sampler.work / (3 * job.batch_size * job.steps)
    return Trace(curves, [sampler.decisions], measured, sampler.seconds, seconds, share)


def decaying(trainer: Any, optimizer: Any, job: Config) -> Any:
    """The job's own learning rates for a Trainer."""
    from torch.optim.lr_scheduler import LambdaLR

    trainer.lr_scheduler = LambdaLR(optimizer, lambda step: job.rate(step) / job.learning_rate)
    return trainer.lr_scheduler
