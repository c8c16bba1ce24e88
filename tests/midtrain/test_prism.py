"""Mid-training: a retention curve that only looks, steps that are the right ones, frozen tensors, resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core import config, determinism, manifest, models
from posttrain.core.errors import TimeLimitReached, UserError
from posttrain.core.tracking import read_history
from posttrain.data import packed
from posttrain.midtrain import prism as midtrain

SOURCES = ("code_web", "facts", "math", "prose")
POINTS = {*(f"held_out/{source}" for source in SOURCES), "fact_recall"}


def job(prism, folder: Path, **options) -> midtrain.Config:
    output = folder / "midtrain" / "prism" / "both" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    defaults = {
        "steps": 6,
        "batch_size": 4,
        "length": 32,
        "learning_rate": 3e-3,
        "measure_every": 2,
        "start": prism.base,
        "mix": prism.mix,
        "facts": prism.facts,
    }
    return midtrain.Config(output=output, **(defaults | options))


def run(prism, folder: Path, **options) -> midtrain.Config:
    one = job(prism, folder, **options)
    midtrain.main(one)
    return one


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "model/model.safetensors")


def same(a: Path, b: Path) -> bool:
    return manifest.read(a).artifacts["model/model.safetensors"] == manifest.read(b).artifacts["model/model.safetensors"]


def points(one: midtrain.Config) -> dict[int, dict[str, float]]:
    """{step: measured values} of the lines that hold a point of the curve."""
    found = {}
    for row in read_history(one.folder / "history.jsonl"):
        measured = {name: value for name, value in row.items() if name in POINTS}
        if measured:
            assert measured.keys() == POINTS
            found[row["step"]] = measured
    return found


def measured(prism, model, mix: Path, length: int = 32, count: int = 16) -> dict[str, float]:
    """The same numbers, put together here."""
    tokenizer = models.load_tokenizer(prism.base)
    found = {}
    for source in manifest.read(mix).card["realised"]:
        data = packed.rows(mix, "validation", length, tokenizer, source=source)[:count]
        found[f"held_out/{source}"] = packed.held_out_loss(model, data)[0]
    from posttrain.core import tables

    right = packed.recall(model, tokenizer, tables.read(prism.facts.parent / "items.parquet"))
    return {**found, "fact_recall": sum(right) / len(right)}


def test_mix_of_another_tokenizer_is_refused(prism, tmp_path):
    """The ids of its rows would mean other text, with no error from any layer."""
    tokenizer = models.load_tokenizer(prism.base)
    tokenizer.add_tokens(["<other>"])
    with pytest.raises(UserError, match="encoded with another tokenizer than the model's"):
        packed.rows(prism.mix, "train", 32, tokenizer)


def test_before_is_the_base_and_the_end_is_what_was_saved(prism, tmp_path):
    one = run(prism, tmp_path)
    found = manifest.read(one.output).metrics
    for prefix, path in (("before/", prism.base), ("", one.output)):
        for name, value in measured(prism, models.load(path), prism.mix).items():
            assert found[prefix + name].value == pytest.approx(value, rel=1e-6), prefix + name
    assert {name.removeprefix("before/") for name in found if "held_out" in name or "recall" in name} == POINTS
    assert found["before/held_out/math"].value > found["held_out/math"].value + 0.1  # it has learnt something
    assert found["tokens"].value == 6 * 4 * 32 and found["trained_parameters"].value == models.load(prism.base).num_parameters()
    assert manifest.read(one.output).card["mix"] == manifest.read(prism.mix).card["realised"]


def test_points_of_the_curve_stand_at_their_steps(prism, tmp_path):
    one = run(prism, tmp_path / "a", steps=5)
    assert [row["step"] for row in read_history(one.folder / "history.jsonl")] == [1, 2, 3, 4, 5]
    found = points(one)
    assert sorted(found) == [2, 4]
    # a point at step k is the model after k steps: a job with the same schedule that ends there says the same
    constant = {"schedule": "constant", "warmup": 0.0, "measure_every": 3}
    long, short = run(prism, tmp_path / "b", steps=4, **constant), run(prism, tmp_path / "c", steps=3, **constant)
    end = {name: manifest.read(short.output).metrics[name].value for name in POINTS}
    assert points(long) == {3: pytest.approx(end, rel=1e-6)} and points(short)[3] == pytest.approx(end, rel=1e-6)


def test_a_sparse_log_moves_no_point(prism, tmp_path):
    every, sparse = (run(prism, tmp_path / str(n), steps=7, measure_every=3, log_every=n) for n in (1, 5))
    assert sorted(points(every)) == [3, 6] and points(sparse) == points(every)
    assert {5} <= {row["step"] for row in read_history(sparse.folder / "history.jsonl")} and same(every.output, sparse.output)


def test_measuring_changes_nothing_of_the_training(prism, tmp_path):
    often, never = run(prism, tmp_path / "a", measure_every=1), run(prism, tmp_path / "b", measure_every=100, facts=None)
    assert len(points(often)) == 6 and same(often.output, never.output)
    losses = [[row["loss"] for row in read_history(one.folder / "history.jsonl")] for one in (often, never)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("training", [True, False])
def test_a_look_leaves_the_random_state_and_the_mode(prism, tmp_path, training):
    one = job(prism, tmp_path)
    curve = midtrain.Curve(one, models.load_tokenizer(prism.base))
    model = models.load(prism.base).train(training)
    determinism.setup(5)
    before = torch.random.get_rng_state()
    first = curve(model)
    assert torch.equal(torch.random.get_rng_state(), before) and model.training is training
    assert curve(model) == first and all(p.grad is None for p in model.parameters())


def test_the_curve_is_that_of_the_held_out_mix_for_every_arm(prism, tmp_path):
    one = run(prism, tmp_path, mix=prism.web, held_out=prism.mix, steps=2, measure_rows=1)
    found = manifest.read(one.output).metrics
    assert {name for name in found if name.startswith("held_out/")} == {f"held_out/{source}" for source in SOURCES}
    expected = measured(prism, models.load(prism.base), prism.mix, count=1)
    assert {name: found[f"before/{name}"].value for name in expected} == pytest.approx(expected, rel=1e-6)
    assert manifest.read(one.output).card["mix"].keys() == {"facts", "prose"}
    alone = run(prism, tmp_path / "own", mix=prism.web, steps=2, facts=None)
    assert {n for n in manifest.read(alone.output).metrics if n.startswith("held_out/")} == {"held_out/facts", "held_out/prose"}


def test_attention_alone_is_trained(prism, tmp_path):
    one = run(prism, tmp_path, trainable="attention", weight_decay=0.1)
    before, after = tensors(prism.base), tensors(one.output)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) is (".self_attn." not in name), name
    attention = sum(value.numel() for name, value in before.items() if ".self_attn." in name)
    assert manifest.read(one.output).metrics["trained_parameters"].value == attention > 0


def test_all_tensors_are_trained_by_default(prism, tmp_path):
    before, after = tensors(prism.base), tensors(run(prism, tmp_path).output)
    assert not any(torch.equal(value, after[name]) for name, value in before.items())


def test_a_model_without_attention_is_one_sentence():
    with pytest.raises(UserError, match="trainable = attention: this model has no tensors of that kind; choose all"):
        midtrain.freeze(torch.nn.Sequential(torch.nn.Linear(2, 2)), "attention")


def test_parameters_that_this_process_does_not_hold_are_counted():
    """Under ZeRO-3 they are empty until they are used; DeepSpeed keeps their whole size beside them."""
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight.data, layer.weight.ds_numel = torch.empty(0), 4
    assert midtrain.freeze(layer, "all") == 4


def test_resume_after_an_interruption_gives_the_same_model_and_history(prism, tmp_path):
    whole = run(prism, tmp_path / "a", checkpoint_every=1)
    with pytest.raises(TimeLimitReached, match="step 1 of 6"):
        run(prism, tmp_path / "b", checkpoint_every=1, max_minutes=1e-9)
    resumed = job(prism, tmp_path / "b", checkpoint_every=1)
    assert not resumed.output.exists() and list(resumed.folder.glob("checkpoints/*/checkpoint-1/complete.json"))
    midtrain.main(resumed)
    assert resumed.output.read_bytes() == whole.output.read_bytes() and same(resumed.output, whole.output)
    assert (resumed.folder / "history.jsonl").read_bytes() == (whole.folder / "history.jsonl").read_bytes()
    assert sorted(points(resumed)) == [2, 4, 6] and not (resumed.folder / "checkpoints").exists()


def test_resume_at_a_point_of_the_curve_keeps_it(prism, tmp_path, monkeypatch):
    """Stopped after step 4, where a point lies: it is neither lost nor written twice."""
    whole = run(prism, tmp_path / "a", checkpoint_every=2)
    plain = midtrain.follow

    def follow(curve, every):
        callback = plain(curve, every)
        measure = callback.on_step_end

        def on_step_end(args, state, control, **keywords):
            measure(args, state, control, **keywords)
            if state.global_step == 5:
                raise KeyboardInterrupt

        callback.on_step_end = on_step_end
        return callback

    monkeypatch.setattr(midtrain, "follow", follow)
    with pytest.raises(KeyboardInterrupt):
        run(prism, tmp_path / "b", checkpoint_every=2)
    monkeypatch.setattr(midtrain, "follow", plain)
    resumed = run(prism, tmp_path / "b", checkpoint_every=2)
    assert resumed.output.read_bytes() == whole.output.read_bytes()
    assert (resumed.folder / "history.jsonl").read_bytes() == (whole.folder / "history.jsonl").read_bytes()


def test_another_order_is_another_run_of_the_same_rows(prism, tmp_path):
    runs = [run(prism, tmp_path / str(order), order=order, facts=None) for order in (0, 1)]
    first = [next(row["loss"] for row in read_history(one.folder / "history.jsonl") if "loss" in row) for one in runs]
    assert first[0] != first[1]  # at the first step the weights are the same: other rows
    assert manifest.read(runs[0].output).card["mix"] == manifest.read(runs[1].output).card["mix"]


@pytest.mark.parametrize("overlap", [32, 40])
def test_overlap_must_be_below_the_length(prism, tmp_path, overlap):
    values = job(prism, tmp_path).model_dump() | {"overlap": overlap}
    with pytest.raises(UserError, match=rf"^midtrain\.yaml: prism: overlap {overlap} must be below length 32$"):
        config.validate(midtrain.Config, values, "midtrain.yaml: prism")
    assert config.validate(midtrain.Config, values | {"overlap": 31}, "x").overlap == 31


def test_data_are_a_mix_or_a_stream(prism, tmp_path):
    values = job(prism, tmp_path).model_dump() | {"mix": None}
    with pytest.raises(UserError, match=r"^x: give either mix or stream$"):
        config.validate(midtrain.Config, values, "x")


def test_overlap_reaches_the_rows(prism, tmp_path, monkeypatch):
    """Chunks of over-long documents overlap in training; what is measured is cut without."""
    asked, plain = [], midtrain.rows

    def watched(path, split, *arguments, **options):
        asked.append((split, options.get("overlap", 0)))
        return plain(path, split, *arguments, **options)

    monkeypatch.setattr(midtrain, "rows", watched)
    overlapping = run(prism, tmp_path / "a", steps=3, overlap=16)
    assert ("train", 16) in asked and {split for split, overlap in asked if not overlap} == {"validation"}
    assert not same(overlapping.output, run(prism, tmp_path / "b", steps=3).output)
