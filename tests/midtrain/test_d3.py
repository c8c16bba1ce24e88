"""The two worlds and the job: the planted property, pairing of replicates, what is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.core import manifest, tables
from posttrain.midtrain import chain, d3, worlds
from posttrain.midtrain.influence import measure
from posttrain.midtrain.schedules import MIXTURE, SCHEDULES, Decision, Rule, Scheduler


def config(tmp_path, schedule="random", world="chain", **options) -> d3.Config:
    path = tmp_path / "midtrain" / "d3" / f"{world}_{schedule}" / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    small = {
        "replicates": 2,
        "skills": 3,
        "symbols": 3,
        "windows": 3,
        "steps_per_unit": 2,
        "batch_size": 8,
        "width": 8,
        "hidden": 12,
        "micro": 2,
        "probe_rows": 4,
        "validation": 20,
        "evaluate_every": 4,
        "shape": {"hidden": 8, "layers": 1, "heads": 2, "intermediate": 16, "context": 8},
    }
    return d3.Config(output=path, schedule=schedule, world=world, **(small | options))


def run(tmp_path, *args, **options):
    job = config(tmp_path, *args, **options)
    d3.main(job)
    files = {name: tables.read(job.folder / name) for name in manifest.read(job.output).artifacts}
    return manifest.read(job.output), files


def test_latin_squares_and_that_a_subset_of_operands_says_nothing():
    squares = worlds.squares(0, 0, 3, 4)
    for square in squares:
        assert all(sorted(line) == [0, 1, 2, 3] for line in [*square, *square.T])
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 4, indexing="ij"), -1).reshape(-1, 4)
    y = squares[2][squares[1][squares[0][grid[:, 0], grid[:, 1]], grid[:, 2]], grid[:, 3]]
    rows = worlds.draw(np.random.default_rng(0), squares, (500,))
    index = np.ravel_multi_index(rows.operands.T, (4, 4, 4, 4))
    assert np.array_equal(rows.answers[:, 2], y[index])
    for left_out in range(4):  # given all other operands the answer is uniform
        assert all(
            sorted(y[(np.delete(grid, left_out, 1) == given).all(1)]) == [0, 1, 2, 3]
            for given in np.unique(np.delete(grid, left_out, 1), axis=0)
        )


def test_a_replicate_is_the_same_however_many_there_are():
    few, many = (worlds.Net(3, R, 2, 3, 6, 8) for R in (2, 4))
    rows = [worlds.stacked(3, "x", [worlds.squares(3, r, 2, 3) for r in range(R)], (10,)) for R in (2, 4)]
    assert np.array_equal(rows[0].operands, rows[1].operands[:2]) and np.array_equal(rows[0].answers, rows[1].answers[:2])
    assert all(torch.equal(a, b[:2]) for a, b in zip(few.parameters, many.parameters, strict=True))
    assert np.allclose(few.score(rows[0])[0], many.score(rows[1])[0][:2], atol=1e-6)
    assert not np.allclose(many.score(rows[1])[0][0], many.score(rows[1])[0][1])


def test_losses_and_scores_of_the_net_agree_and_replicates_do_not_mix():
    net = worlds.Net(0, 2, 3, 4, 8, 12)
    rows = worlds.stacked(0, "x", [worlds.squares(0, r, 3, 4) for r in range(2)], (30,))
    operands, answers = map(torch.from_numpy, rows)
    for k in range(3):
        losses = net.losses(operands, answers, torch.full((2, 30), k))
        assert np.allclose(losses.detach().mean(1), net.score(rows)[0][:, k], atol=1e-6)
    mixed = torch.randint(3, (2, 30), generator=torch.Generator().manual_seed(0))
    losses = net.losses(operands, answers, mixed)
    assert losses[1, 4].item() == pytest.approx(
        net.losses(operands, answers, torch.full((2, 30), int(mixed[1, 4])))[1, 4].item(), rel=1e-5
    )
    gradient = torch.autograd.grad(losses[0].sum(), net.parameters)
    assert all(g[0].abs().sum() > 0 and not g[1].any() for g in gradient)


def test_sequences_for_the_decoder_by_hand():
    vocabulary = worlds.Vocabulary(2, 3)
    rows = worlds.Rows(np.array([[0, 2, 1], [1, 0, 2]]), np.array([[2, 1], [1, 0]]))
    first, second = worlds.sequences(rows, np.array([0, 1]), vocabulary)
    assert first["input_ids"].tolist() == [0, 5, 9 + 2, 12] and second["input_ids"].tolist() == [1, 3, 8, 9 + 0]
    assert first["labels"].tolist() == [-100, -100, 11, -100] and second["labels"].tolist() == [-100, -100, -100, 9]
    assert first["attention_mask"].tolist() == [1, 1, 1, 0] and len(vocabulary) == 13


@pytest.mark.parametrize("skill, learned", [(1, True), (3, False), (4, False)])
def test_which_skills_can_be_learned_alone(tmp_path, skill, learned):
    """As many steps as a skill has in the study, on that skill alone (numbered from 0). The net is trained end to end, so the
    second skill needs no other; the last two do, even with five times the steps."""
    job = config(
        tmp_path,
        skills=5,
        symbols=5,
        windows=2,
        steps_per_unit=20,
        batch_size=64,
        width=48,
        hidden=96,
        validation=128,
        evaluate_every=200,
    )
    job = job.model_copy(update={"windows": 2 if learned or skill == 4 else 10})
    data = chain.corpus(job)
    domains = [chain.domain(k) for k in data.skill]
    only = [Scheduler("doremi", job.rule, data.windows, domains, r, weights=np.eye(5)[skill]) for r in range(2)]
    for row in chain.train_chain(job, data, only).curves[-2:]:
        if learned:
            assert row[f"accuracy_{skill + 1}"] > 0.9
        else:
            assert row[f"accuracy_{skill + 1}"] < 0.35 and row[f"loss_{skill + 1}"] > 0.9 * np.log(5)


def test_the_top_skill_is_learned_with_the_others(tmp_path):
    job = config(
        tmp_path,
        skills=4,
        symbols=5,
        windows=8,
        steps_per_unit=20,
        batch_size=64,
        width=48,
        hidden=96,
        validation=128,
        evaluate_every=640,
    )
    data = chain.corpus(job)
    every = [Scheduler("random", job.rule, data.windows, [""] * 32, r) for r in range(2)]
    together = chain.train_chain(job, data, every).curves[-1]
    assert together["accuracy_4"] > 0.9


def test_the_look_is_the_influence_of_each_replicate_alone(tmp_path):
    job = config(tmp_path, "d3")
    data, net = chain.corpus(job), worlds.Net(0, 2, 3, 3, 8, 12)
    optimizer = torch.optim.AdamW(net.parameters)
    both = chain.Looker(job, data, net, optimizer).influence(data.windows[1], "raw_fd", 0.1)
    single = worlds.Net(0, 1, 3, 3, 8, 12)

    def losses(half, unit, part):
        rows = [torch.from_numpy(x[:1, unit][:, part]) for x in half]
        return single.losses(*rows, torch.full(rows[0].shape[:2], unit % 3)).mean(1)

    found = measure(
        single.parameters,
        lambda i, m: losses(data.train, 3 + i, slice(m * 8, m * 8 + 8)),
        lambda m: torch.stack([losses(data.probe, 3 + i, m) for i in range(3)], 1),
        units=3,
        micro=2,
        step=0.1,
    )
    assert np.allclose(both.A[0], found.A[0], atol=1e-6) and np.abs(found.A).max() > 1e-4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_on_the_chain(tmp_path, schedule):
    found, files = run(tmp_path, schedule)
    replicates, orders, curves = (files[f"{name}.parquet"] for name in ("replicates", "orders", "curves"))
    assert [row["replicate"] for row in replicates] == [0, 1] and len(orders) == 6
    assert [row["step"] for row in curves if row["replicate"] == 1] == [0, 4, 8, 12, 16, 18]
    for row in replicates:
        last = [c for c in curves if c["replicate"] == row["replicate"]][-1]
        assert row["loss"] == last["loss"] == pytest.approx(np.mean([row[f"loss_{k}"] for k in (1, 2, 3)]))
        assert row["censored"] and row["steps_to_90"] == 18 and row["accuracy_top"] == last["accuracy_3"]
        assert row["probe_seconds"] >= 0 < row["train_seconds"]
    for row in orders:
        units = range(3 * row["window"], 3 * row["window"] + 3)
        assert len(row["order"]) == 3 and (schedule in MIXTURE or sorted(row["order"]) == [*units])
    directed = schedule in ("d3", "d3_reversed")
    assert ("influence.parquet" in files) == directed == (replicates[0]["direction"] is not None)
    if directed:
        matrix = files["influence.parquet"]
        assert len(matrix) == 2 * 3 * 9 and list(matrix[0]) == ["replicate", "window", "edge", "i", "j", "A", "se", "D", "se_D"]
        cell = {(row["replicate"], row["window"], row["i"], row["j"]): row for row in matrix}
        for (r, w, i, j), row in cell.items():
            assert row["D"] == pytest.approx(row["A"] - cell[r, w, j, i]["A"], abs=1e-12)
        hits = [cell[0, w, k - 1, k]["D"] > 0 for w in range(3) for k in (1, 2)]
        assert replicates[0]["direction"] == pytest.approx(np.mean(hits))
        assert 0 <= replicates[0]["edge_rate"] <= 0.5
    assert replicates[0]["kendall_random"] == (None if schedule in MIXTURE else pytest.approx(replicates[0]["kendall_random"]))
    assert found.metrics["loss"].n == 2 and found.metrics["steps_to_90"].value == 18 and found.not_deterministic


def test_replicates_are_paired_across_schedules_and_runs_repeat(tmp_path):
    one, other = run(tmp_path / "a", "random")[1], run(tmp_path / "a", "hard_first")[1]
    start = [[c for c in files["curves.parquet"] if c["step"] == 0] for files in (one, other)]
    assert start[0] == start[1], "same initialisation and validation rows"
    again = run(tmp_path / "b", "random")[1]
    assert again["curves.parquet"] == one["curves.parquet"] and again["orders.parquet"] == one["orders.parquet"]
    quiet = run(tmp_path / "c", "d3", rule=Rule(z=1e9))[1]
    assert quiet["curves.parquet"] == one["curves.parquet"], (
        "d3 without a sure edge is the random order, and probing leaves no trace"
    )
    assert quiet["replicates.parquet"][0]["kendall_random"] == quiet["replicates.parquet"][0]["fell_back"] == 1


def test_all_definitions_of_influence_are_measured_on_request(tmp_path):
    _, files = run(tmp_path, "d3", diagnose=[1])
    seen = {(row["window"], row["edge"]) for row in files["influence.parquet"]}
    assert seen == {(w, "raw_fd") for w in range(3)} | {(1, e) for e in ("rel_loss", "unit_step", "pair_exact")}
    plain = run(tmp_path / "plain", "d3")[1]
    assert plain["curves.parquet"] == files["curves.parquet"]
    assert plain["replicates.parquet"][0]["flops_share"] == files["replicates.parquet"][0]["flops_share"]


def test_the_null_world_goes_through_the_trainer(tmp_path):
    found, files = run(tmp_path, "d3", "iid")
    plain = run(tmp_path, "random", "iid")[1]
    rows = files["replicates.parquet"]
    assert found.metrics["edge_nominal"].value == pytest.approx(0.25)  # one tail of Cauchy above 1
    assert rows[0]["direction"] is None and rows[0]["edge_rate"] is not None and "loss_3" not in rows[0]
    start = [[c for c in f["curves.parquet"] if c["step"] == 0] for f in (files, plain)]
    assert start[0] == start[1] and files["curves.parquet"] != plain["curves.parquet"]
    quiet = run(tmp_path / "quiet", "d3", "iid", rule=Rule(z=1e9))[1]
    assert quiet["curves.parquet"] == plain["curves.parquet"], "probing inside the Trainer leaves no trace"
    assert {row["window"] for row in files["influence.parquet"]} == {0, 1, 2} and len(files["orders.parquet"]) == 6


def test_contradictions_are_refused(tmp_path):
    for options, message in (
        ({"world": "iid", "schedule": "doremi"}, "a mixture needs several domains"),
        ({"asked": 4}, "asked 4 is more than skills 3"),
        ({"steps_per_unit": 1, "batch_size": 1, "micro": 2}, "fewer rows than micro"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **options)


def test_the_learning_rate_is_constant_and_then_falls_to_zero(tmp_path):
    job = config(tmp_path, windows=10, steps_per_unit=10, decay=0.2, learning_rate=1.0)  # 300 steps
    assert (
        [job.rate(s) for s in (0, 239)] == [1, 1]
        and job.rate(299) == pytest.approx(1 / 61)
        and job.rate(269) == pytest.approx(31 / 61)
    )


def test_rows_of_replicates_by_hand(tmp_path):
    job = config(tmp_path, skills=2, windows=1, asked=2)
    curve = [
        {"replicate": 0, "step": s, "loss": x, "loss_1": 0.1, "loss_2": x, "accuracy_1": 1.0, "accuracy_2": a}
        for s, x, a in ((0, 3.0, 0.2), (4, 1.0, 0.9), (8, 0.0, 0.5))
    ]
    row = d3.replicate_row(job, worlds.Trace(curve, [[Decision(0, [1, 0])]], [], 4.0, 2.0, 0.5), 0)
    assert row["steps_to_90"] == 4 and not row["censored"] and row["accuracy_top"] == 0.5
    assert row["area"] == pytest.approx((4 * 2 + 4 * 0.5) / 8) and row["probe_seconds"] == 2.0
    D = np.array([[0, 1.0, 0], [-1.0, 0, -1.0], [0, 1.0, 0]])
    assert d3.live_pairs(D, np.array([0.0, 0.1, 1.0]), 5) == ([True, False], [False])
