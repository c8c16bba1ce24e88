"""The sampler inside a real Trainer: when orders are decided, resuming, several processes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from posttrain.core import models, tables
from posttrain.core.errors import UserError
from posttrain.core.models import Shape
from posttrain.midtrain import worlds
from posttrain.midtrain.sampler import Unit, WindowSampler, install, row_losses
from posttrain.midtrain.schedules import Rule, Scheduler, Seen

K, W, STEPS, BATCH, PROBES = 3, 3, 2, 4, 4
SIZE, COUNT = STEPS * BATCH, 3 * 3


def data() -> list[dict]:
    rng = np.random.default_rng(0)
    rows = worlds.draw(rng, worlds.squares(0, 0, 2, 4), (COUNT * (SIZE + PROBES),))
    return worlds.sequences(rows, rng.integers(2, size=len(rows.operands)), worlds.Vocabulary(2, 4))


def sampler(schedule="d3", store=None, rule=None) -> WindowSampler:
    first = COUNT * SIZE
    units = [
        Unit(tuple(range(u * SIZE, (u + 1) * SIZE)), tuple(range(first + u * PROBES, first + (u + 1) * PROBES)), "abc"[u % K])
        for u in range(COUNT)
    ]
    windows = np.arange(COUNT).reshape(W, K).tolist()
    return WindowSampler(Scheduler(schedule, rule or Rule(z=0), windows, [u.domain for u in units], 0), units, store)


def trainer(folder, callbacks=(), **options):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = models.scratch(Shape(hidden=8, layers=1, heads=2, intermediate=16, context=8), worlds.Vocabulary(2, 4))
    defaults = {"per_device_train_batch_size": BATCH, "learning_rate": 1e-2, "save_strategy": "no", "seed": 0}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=COUNT * STEPS,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        logging_strategy="no",
        **(defaults | options),
    )
    return Trainer(model=model, args=arguments, train_dataset=data(), callbacks=list(callbacks))


def weights(made) -> list:
    return [p.detach().clone() for p in made.model.parameters()]


def noting(found: WindowSampler, made) -> list[tuple[int, int]]:
    """(window, optimizer steps done) for each look."""
    looks, look = [], found.look

    def noted(scheduler, window):
        looks.append((window, made.state.global_step))
        return look(scheduler, window)

    found.look = noted
    return looks


def test_rows_are_trained_in_the_decided_order_and_windows_are_decided_one_batch_ahead(tmp_path):
    made, trained = trainer(tmp_path), []
    found = install(made, sampler(), micro=2, rows=BATCH)
    looks, step = noting(found, made), made.training_step
    numbers = {tuple(row["input_ids"].tolist()) + tuple(row["labels"].tolist()): i for i, row in enumerate(made.train_dataset)}

    def spied(model, inputs, *args, **kwargs):
        trained.extend(zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True))
        return step(model, inputs, *args, **kwargs)

    made.training_step = spied
    made.train()
    expected = [row for d in found.decisions for u in d.order for row in found.units[u].rows]
    assert len(numbers) > 20 and [made.train_dataset[i]["input_ids"].tolist() for i in expected] == [ids for ids, _ in trained]
    assert sorted(expected) == list(range(COUNT * SIZE)), "every unit exactly once, no probe row"
    assert looks == [(w, max(0, w * K * STEPS - 1)) for w in range(W)], "one optimizer step before the window starts"
    assert found.work > 0 < found.seconds and len(found) == COUNT * SIZE
    assert any(d.order != sorted(d.order) for d in found.decisions)


def test_looking_changes_nothing_of_the_training(tmp_path):
    """The random order with and without measurements of influence before each window."""
    plain, looked = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    install(plain, sampler("random"), micro=2, rows=BATCH)
    found = install(looked, sampler("random"), micro=2, rows=BATCH)
    asking, look = sampler("d3").scheduler, found.look
    seen = []
    found.look = lambda scheduler, window: seen.append(look(asking, window)) or Seen()
    plain.train()
    looked.train()
    assert len(seen) == W and all(np.abs(one.influence.A).max() > 0 for one in seen)
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(looked), strict=True))


def test_the_look_sees_losses_and_gradients_of_the_unit_halves(tmp_path):
    made = trainer(tmp_path)
    found = install(made, sampler(), micro=2, rows=3)
    made.create_optimizer()
    seen = found.look(found.scheduler, 1)
    for k, u in enumerate(found.scheduler.windows[1]):
        rows = [made.train_dataset[i] for i in found.units[u].probe]
        halves = [made.data_collator(rows[:2]), made.data_collator(rows[2:])]
        with torch.no_grad():
            parts = [made.model.eval()(**half).loss.item() for half in halves]
        assert seen.losses[k] == pytest.approx(np.mean(parts), rel=1e-5)
        assert seen.influence.losses[k] == pytest.approx(seen.losses[k])
    assert found.work == 2 * K * 2 + 2 * K * 3 * 3 + (2 + 2 * K) * K * 2  # losses; gradients of 3 rows; lookaheads and their base
    balanced = sampler("grab")
    found.look.sampler = balanced
    gradients = found.look(balanced.scheduler, 1).gradients
    batch = made.data_collator([made.train_dataset[i] for i in balanced.units[3].rows[:3]])
    made.model.zero_grad()
    made.model.eval()(**batch).loss.backward()
    flat = torch.cat([p.grad.flatten() for p in made.model.parameters()]).double().numpy()
    assert np.allclose(gradients[0], flat, atol=1e-6)


def test_units_inherit_the_influence_of_their_representative(tmp_path):
    """Windows of three units, two clusters: two units share their rows and have nothing between them."""
    made = trainer(tmp_path)
    found = install(made, sampler(rule=Rule(representatives=2, projection=64)), micro=2, rows=3)
    made.create_optimizer()
    found.units = [found.units[0], found.units[1], found.units[1], *found.units[3:]]
    D = found.look(found.scheduler, 0).influence.D
    assert D[1, 2] == D[2, 1] == 0 and D[0, 1] == D[0, 2] == -D[1, 0] != 0
    whole = install(made, sampler(), micro=2, rows=3)
    assert whole.look(whole.scheduler, 0).influence.D[0, 1] == pytest.approx(D[0, 1], abs=1e-9)


def test_a_resumed_run_replays_its_orders_and_ends_where_an_unbroken_one_does(tmp_path):
    whole = trainer(tmp_path / "whole")
    unbroken = install(whole, sampler(store=tmp_path / "whole.parquet"), micro=2, rows=BATCH)
    whole.train()
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 8

    options = {"save_strategy": "steps", "save_steps": 4}
    broken = trainer(tmp_path / "runs", [Stop()], **options)
    install(broken, sampler(store=tmp_path / "orders.parquet"), micro=2, rows=BATCH)
    broken.train()
    assert [row["window"] for row in tables.read(tmp_path / "orders.parquet")] == [0, 1]
    resumed = trainer(tmp_path / "runs", **options)
    found = install(resumed, sampler(store=tmp_path / "orders.parquet"), micro=2, rows=BATCH)
    looks = noting(found, resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "runs" / "checkpoint-4"))
    assert looks == [(2, 2 * K * STEPS - 1)], "windows 0 and 1 are replayed, though the checkpoint is older than window 1"
    assert found.decisions == unbroken.decisions, "with the averages that window 2 rests on"
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    stored = tables.read(tmp_path / "orders.parquet")
    assert stored[-1]["work"] == unbroken.work and stored[-1]["seconds"] == found.seconds


@pytest.mark.parametrize("schedule", ["easy_first", "grab"])
def test_looks_are_taken_without_dropout_and_leave_the_random_state(tmp_path, schedule):
    made = trainer(tmp_path)
    for module in made.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.9
    found = install(made, sampler(schedule), micro=2, rows=3)
    made.model.train()
    state = torch.random.get_rng_state()
    first, second = (found.look(found.scheduler, 1) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state()) and all(m.training for m in made.model.modules())
    for a, b in zip(first[::2], second[::2], strict=True):
        assert a is b is None or np.array_equal(a, b)


def test_accumulation_keeps_the_lag_at_one_micro_batch(tmp_path):
    made = trainer(tmp_path, per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2)
    looks = noting(install(made, sampler(), micro=2, rows=BATCH), made)
    made.train()
    assert looks == [(w, max(0, w * K * STEPS - 1)) for w in range(W)]


def test_units_of_part_steps_or_unequal_size_or_too_few_rows_are_refused(tmp_path):
    with pytest.raises(UserError, match="a unit has 8 rows and an optimizer step takes 3"):
        install(trainer(tmp_path, per_device_train_batch_size=3), sampler(), micro=2, rows=2)
    one = sampler()
    with pytest.raises(UserError, match=r"units have \[1, 8\] rows"):
        WindowSampler(one.scheduler, [Unit((0,)), *one.units[1:]])
    made = trainer(tmp_path)
    found = install(made, sampler(), micro=5, rows=2)
    made.create_optimizer()
    with pytest.raises(UserError, match="a unit has 4 probe rows for 5 micro-batches"):
        found.look(found.scheduler, 0)


def test_row_losses_are_sums_over_labels():
    torch.manual_seed(0)
    vocabulary = worlds.Vocabulary(2, 4)
    model = models.scratch(Shape(hidden=8, layers=1, heads=2, intermediate=16, context=8), vocabulary).eval()
    batch = {name: torch.stack([row[name] for row in data()[:6]]) for name in data()[0]}
    total, count = row_losses(model, batch)
    assert count.tolist() == [1] * 6 and float(total.detach().sum() / 6) == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    two = row_losses(model, {**batch, "labels": batch["input_ids"]})
    assert two[1].tolist() == [3] * 6 and (two[0] > total).all()


RANKS = """
import json, sys, torch
from tests.midtrain.test_sampler import sampler
from posttrain.midtrain.schedules import Seen
import numpy as np
from posttrain.midtrain.influence import Influence
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
rank = torch.distributed.get_rank()
found, looks = sampler(), []
def look(scheduler, window):
    looks.append(window)
    A = np.random.default_rng(100 * rank + window).normal(size=(3, 3))
    return Seen(np.ones(3), Influence(A, A - A.T, np.zeros((3, 3)), np.zeros((3, 3)), np.ones(3)))
found.look = look
orders = [found.decide(w).order for w in range(3)]
average = found.scheduler.average.A.tolist()
with open(f"{sys.argv[1]}/{rank}.json", "w") as stream:
    json.dump([rank, looks, orders, average], stream)
torch.distributed.barrier()  # a process that ends while the other still talks to it is killed
torch.distributed.destroy_process_group()
"""


def test_all_ranks_take_the_order_of_rank_0(tmp_path):
    import json

    running = [subprocess.Popen([sys.executable, "-c", RANKS, str(tmp_path), str(r)]) for r in (0, 1)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    first, second = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert first[1] == [0, 1, 2] and second[1] == [], "rank 0 alone looks"
    assert first[2:] == second[2:]


def test_a_unit_whose_loss_is_not_finite_goes_last_and_training_goes_on(tmp_path):
    made = trainer(tmp_path)
    found = install(made, sampler(), micro=2, rows=3)
    made.create_optimizer()
    losses_of = found.look.losses_of

    def broken(rows):
        total, count = losses_of(rows)
        wrong = torch.tensor([row in found.units[1].probe for row in rows])
        return torch.where(wrong, torch.nan, total), count

    found.look.losses_of = broken
    decision = found.decide(0)
    assert decision.order[-1] == 1 and sorted(decision.order) == [0, 1, 2] and np.isnan(decision.scores[1])
