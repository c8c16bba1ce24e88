"""Checkpoints that can be trusted, batch arithmetic, stops. Nothing is trained here."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.core import receipts, training
from posttrain.core.config import key
from posttrain.core.errors import TimeLimitReached, UserError
from posttrain.core.tracking import Tracker, read_history
from posttrain.core.training import MARKER, TrainingConfig, arguments, damage, newest_complete, seal


class Config(TrainingConfig):
    start: Path | None = key(None, help="input", role="input")


@pytest.fixture
def output(tmp_path) -> Path:
    path = tmp_path / "sft" / "train" / "arm" / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True)
    return path


def job(output: Path, **values) -> Config:
    return Config(**{"output": output, **values})


def checkpoint(folder: Path, step: int, sealed: bool = True) -> Path:
    path = folder / f"checkpoint-{step}"
    (path / "nested").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(range(256)) * step)
    (path / "nested" / "rng_state.pth").write_text("state")
    (path / "empty").write_text("")
    if sealed:
        seal(path)
    return path


# --- checkpoints ----------------------------------------------------------------------------------------------


def test_sealed_is_whole(tmp_path):
    path = checkpoint(tmp_path, 1)
    assert damage(path) is None
    assert set(json.loads((path / MARKER).read_text())) == {"model.safetensors", "nested/rng_state.pth", "empty"}


def test_sealed_again_after_a_resume_is_whole(tmp_path):
    """The Trainer saves over a folder that an earlier attempt left, marker included."""
    path = checkpoint(tmp_path, 1)
    (path / "model.safetensors").write_bytes(b"new")
    assert damage(path)
    seal(path)
    assert damage(path) is None
    seal(path)
    assert damage(path) is None


def test_moved_is_whole(tmp_path):
    path = checkpoint(tmp_path, 1)
    assert damage(Path(shutil.move(path, tmp_path / "elsewhere"))) is None


def test_truncated_changed_and_missing(tmp_path):
    path = checkpoint(tmp_path, 1)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert damage(path) == "model.safetensors is truncated or missing"
    weights.write_bytes(whole[:7] + b"\xff" + whole[8:])
    assert damage(path) == "model.safetensors has changed"
    weights.write_bytes(whole)
    assert damage(path) is None
    (path / "nested" / "rng_state.pth").unlink()
    assert damage(path) == "nested/rng_state.pth is truncated or missing"


@pytest.mark.parametrize("marker", [None, b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b"\0\0\0"])
def test_unfinished(tmp_path, marker):
    path = checkpoint(tmp_path, 1)
    (path / MARKER).unlink()
    if marker is not None:
        (path / MARKER).write_bytes(marker)
    assert damage(path) == "it was not finished"
    assert damage(tmp_path / "nowhere") == "it was not finished"


def test_newest_complete_counts_in_numbers(tmp_path):
    for step in (20, 100, 9):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "other-200").mkdir()
    assert newest_complete(tmp_path).name == "checkpoint-100"
    assert newest_complete(tmp_path / "nothing") is None


def test_damaged_ones_are_named_and_passed_over(tmp_path, capsys):
    checkpoint(tmp_path, 10)
    (checkpoint(tmp_path, 20) / "model.safetensors").write_bytes(b"short")
    checkpoint(tmp_path, 30, sealed=False)
    assert newest_complete(tmp_path).name == "checkpoint-10"
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and "checkpoint-30 is not used: it was not finished" in warnings[0]
    assert "checkpoint-20 is not used: model.safetensors is truncated or missing" in warnings[1]
    (tmp_path / "checkpoint-10" / "empty").write_text("x")
    assert newest_complete(tmp_path) is None


def test_folder_names_configuration_and_inputs(output, tmp_path):
    start = tmp_path / "start.json"
    start.write_text("a")

    def folder(**values):
        return training.checkpoint_folder(job(output, **{"start": start, **values}))

    first = folder()
    assert first.parent == output.parent / "checkpoints" and len(first.name) == 12
    assert folder(log_every=9, checkpoint_every=3, max_minutes=5, workers=2) == first
    assert len({first, folder(seed=1), folder(steps=5), folder(learning_rate=1e-3)}) == 4
    start.write_text("b")
    assert folder() != first


def test_folder_names_code(output, monkeypatch):
    monkeypatch.setattr(Config, "__module__", "posttrain.sft.train")
    first = training.checkpoint_folder(job(output))
    monkeypatch.setattr(receipts, "code_digest", lambda module: f"other code of {module}")
    assert training.checkpoint_folder(job(output)) != first


# --- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "batch", "accumulation", "per_device"),
    [(1, 64, 1, 64), (1, 64, 8, 8), (2, 64, 4, 8), (4, 64, 16, 1), (3, 12, 2, 2)],
)
def test_batch_arithmetic(output, monkeypatch, world, batch, accumulation, per_device):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    found = arguments(job(output, batch_size=batch, accumulation=accumulation))
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (per_device, accumulation)
    assert found["per_device_train_batch_size"] * world * accumulation == batch


@pytest.mark.parametrize(("world", "batch", "accumulation"), [(3, 64, 1), (4, 8, 4), (2, 1, 1)])
def test_batch_that_cannot_be_shared_out(output, monkeypatch, world, batch, accumulation):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(
        UserError, match=f"batch_size {batch} is not a multiple of {world} processes x {accumulation} accumulation"
    ):
        arguments(job(output, batch_size=batch, accumulation=accumulation))


def test_other_arguments(output):
    found = arguments(
        job(output, seed=7, steps=50, warmup=0.1, precision="bfloat16", checkpoint_every=10, max_grad_norm=0.5), bf16=False
    )
    assert (found["seed"], found["data_seed"], found["max_steps"], found["warmup_steps"]) == (7, 7, 50, 5)
    assert (found["save_strategy"], found["save_steps"], found["max_grad_norm"]) == ("steps", 10, 0.5)
    assert found["bf16"] is False  # what a job adds wins
    assert found["report_to"] == "none" and found["logging_nan_inf_filter"] is False and found["remove_unused_columns"] is False
    plain = arguments(job(output, warmup=0.0))
    assert plain["save_strategy"] == "no" and plain["warmup_steps"] == 0 and plain["bf16"] is False and plain["deepspeed"] is None
    assert arguments(job(output, precision="bfloat16"))["bf16"] is True
    assert arguments(job(output, steps=3, warmup=0.05))["warmup_steps"] == 1


def test_transformers_takes_them(output):
    from transformers import TrainingArguments

    found = TrainingArguments(**arguments(job(output, batch_size=12, accumulation=3, steps=20, warmup=0.1)))
    assert found.train_batch_size == 4 and found.get_warmup_steps(20) == 2 and found.max_steps == 20
    assert found.report_to == [] and found.disable_tqdm and found.save_total_limit == 2


def test_deepspeed_file(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(training, "start_deepspeed", lambda: started.append(1))
    (tmp_path / "configs" / "deepspeed").mkdir(parents=True)
    (tmp_path / "configs" / "deepspeed" / "zero2.json").write_text("{}")
    assert arguments(job(output, deepspeed="zero2"))["deepspeed"] == "configs/deepspeed/zero2.json" and started
    with pytest.raises(UserError, match=r"deepspeed = 'zero9': configs/deepspeed/zero9\.json does not exist"):
        arguments(job(output, deepspeed="zero9"))


# --- stops ----------------------------------------------------------------------------------------------------


def callback(one: Config):
    return training.make_callback(one, Tracker(one))


def state(step: int, last: int = 10) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=last, is_world_process_zero=True)


def control() -> SimpleNamespace:
    return SimpleNamespace(should_save=False, should_training_stop=False)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_stops_with_a_sentence(output, name, value):
    logs = {"loss": 1.0, "grad_norm": 1.0, name: value}
    with pytest.raises(UserError, match=rf"{name} is (nan|inf) at step 3 of .*; lower learning_rate \(now 0\.0005\)"):
        callback(job(output)).on_log(None, state(3), None, logs)


def test_history_holds_numbers_that_do_not_differ_between_runs(output):
    found = callback(job(output))
    found.on_log(
        None,
        state(1),
        None,
        {
            "loss": 0.5,
            "learning_rate": 1e-3,
            "text": "x",
            "train_samples_per_second": 4.0,
            "step_time": 2.0,
            "held_out/times": 1.0,
        },
    )
    found.on_log(None, state(1), None, {"train_runtime": 1.0, "train_loss": 0.5})
    found.on_log(None, state(2), None, None)
    assert read_history(output.parent / "history.jsonl") == [
        {"step": 1, "loss": 0.5, "learning_rate": 1e-3, "held_out/times": 1.0},
        {"step": 2},
    ]


def test_time_limit_saves_and_stops(output, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_STARTED", str(time.time() - 61))
    found, flags = callback(job(output, max_minutes=1)), control()
    found.on_step_end(None, state(3), flags)
    assert flags.should_save and flags.should_training_stop and found.out_of_time
    for options, step in (
        ({"max_minutes": 2}, 3),
        ({"max_minutes": None}, 3),
        ({"max_minutes": 1}, 10),
    ):  # the last step ends anyway
        found, flags = callback(job(output, **options)), control()
        found.on_step_end(None, state(step), flags)
        assert not (flags.should_save or flags.should_training_stop or found.out_of_time)


def test_saved_checkpoints_are_sealed_by_rank_0(tmp_path, output):
    found = callback(job(output))
    one, two = checkpoint(tmp_path, 4, sealed=False), checkpoint(tmp_path, 5, sealed=False)
    found.on_save(SimpleNamespace(output_dir=str(tmp_path)), state(4), None)
    other = state(5)
    other.is_world_process_zero = False
    found.on_save(SimpleNamespace(output_dir=str(tmp_path)), other, None)
    assert damage(one) is None and damage(two) == "it was not finished"


class Trainer:
    """What `train` needs of a Trainer."""

    def __init__(self, step: int = 100) -> None:
        self.resumed: list[str | None] = []
        self.state = SimpleNamespace(global_step=step)

    def train(self, resume_from_checkpoint):
        self.resumed.append(resume_from_checkpoint)


def test_train_resumes_this_jobs_newest_checkpoint_and_drops_others(output, capsys):
    one = job(output)
    folder = training.checkpoint_folder(one)
    checkpoint(folder, 10), checkpoint(folder, 20)
    checkpoint(folder.parent / "0123456789ab", 90)
    tracker = Tracker(one)
    for step in (10, 20, 30):
        tracker.log(step, {"loss": 1.0})
    trainer = Trainer()
    training.train(trainer, one, tracker, SimpleNamespace(out_of_time=False))
    assert trainer.resumed == [str(folder / "checkpoint-20")] and list(folder.parent.iterdir()) == [folder]
    assert [row["step"] for row in read_history(tracker.path)] == [10, 20] and "resuming from step 20" in capsys.readouterr().out


def test_train_starts_at_the_beginning_without_a_checkpoint(output):
    one = job(output)
    tracker = Tracker(one)
    tracker.log(3, {"loss": 1.0})
    trainer = Trainer()
    training.train(trainer, one, tracker, SimpleNamespace(out_of_time=False))
    assert trainer.resumed == [None] and read_history(tracker.path) == []


def test_train_says_how_far_it_came(output):
    one = job(output, max_minutes=3, steps=50)
    with pytest.raises(TimeLimitReached, match=r"stopped after 3 minutes at step 7 of 50\."):
        training.train(Trainer(7), one, Tracker(one), SimpleNamespace(out_of_time=True))


def test_only_rank_0_discards(output, monkeypatch):
    one = job(output)
    path = checkpoint(training.checkpoint_folder(one), 1)
    monkeypatch.setenv("RANK", "1")
    training.discard_checkpoints(one)
    assert path.exists()
    monkeypatch.setenv("RANK", "0")
    training.discard_checkpoints(one)
    training.discard_checkpoints(one)
    assert not (output.parent / "checkpoints").exists()


# --- saving ---------------------------------------------------------------------------------------------------


class Saver(Trainer):
    """A trainer whose model is a text file."""

    def __init__(self, rank0: bool = True) -> None:
        super().__init__()
        self.rank0, self.saved = rank0, []
        self.model = SimpleNamespace(config=SimpleNamespace(use_cache=False))
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model, wait_for_everyone=lambda: None)

    def is_world_process_zero(self) -> bool:
        return self.rank0

    def save_model(self, folder: str) -> None:
        self.saved.append(folder)
        if self.rank0:
            assert not Path(folder).exists()  # what an earlier attempt left there is gone
            Path(folder).mkdir()
            for name in ("model.safetensors", "training_args.bin"):
                (Path(folder) / name).write_text("new")


TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: (Path(folder) / "tokenizer.json").write_text("{}"))


def test_trained_model_replaces_an_older_one_and_carries_no_pickle(output):
    for folder in ("model", ".model.partial"):
        (output.parent / folder).mkdir()
        (output.parent / folder / "left_over.bin").write_text("old")
    trainer = Saver()
    files = training.save_trained(trainer, TOKENIZER, job(output))
    assert files == [output.parent / "model" / name for name in ("model.safetensors", "tokenizer.json")]
    assert all(file.is_file() for file in files) and [p.name for p in output.parent.iterdir()] == ["model"]
    assert trainer.model.config.use_cache is True


def test_other_ranks_take_part_in_gathering_and_write_nothing(output):
    trainer = Saver(rank0=False)
    assert training.save_trained(trainer, TOKENIZER, job(output)) == []
    assert len(trainer.saved) == 1 and list(output.parent.iterdir()) == []
