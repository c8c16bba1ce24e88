"""The local history, and W&B beside it without any effect on it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from posttrain.core import tracking
from posttrain.core.errors import UserError
from posttrain.core.tracking import Tracker, check_key, mode, read_history, run_id
from posttrain.core.training import TrainingConfig


@pytest.fixture
def job(tmp_path) -> TrainingConfig:
    output = tmp_path / "results" / "tiny" / "sft" / "train" / "arm" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True)
    return TrainingConfig(output=output)


class Wandb(types.ModuleType):
    """Records what it is asked; knows the few names that the tracker uses."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple] = []
        self.summary: dict = {}
        self.broken: set[str] = set()
        self.Settings = lambda **options: options

    def init(self, **options):
        self.options = options
        if options["mode"] in self.broken:
            raise ConnectionError("no route to host\nand more")
        return self

    def teardown(self):
        self.calls.append(("teardown",))

    def define_metric(self, *names, **options):
        self.calls.append(("define", names, options))

    def log(self, values, step, commit):
        if "log" in self.broken:
            raise BrokenPipeError("its process is gone")
        self.calls.append(("log", values, step, commit))

    def finish(self, exit_code=0):
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch) -> Wandb:
    found = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_mode(monkeypatch):
    assert mode() == "disabled"
    for value in tracking.MODES:
        monkeypatch.setenv("POSTTRAIN_WANDB_MODE", value)
        assert mode() == value
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "on")
    with pytest.raises(UserError, match=r"wandb\.mode = 'on': choose one of disabled, offline, online"):
        mode()


def test_online_needs_a_key_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for value in ("disabled", "offline"):
        check_key(value)
    with pytest.raises(UserError, match="online needs a key"):
        check_key("online")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_key("online")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8443/x")
    with pytest.raises(UserError):
        check_key("online")
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password secret\n")
    check_key("online")
    (tmp_path / "netrc").write_text("not a netrc file at all {")
    with pytest.raises(UserError):
        check_key("online")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    check_key("online")


def test_run_id_is_the_same_for_every_attempt_and_no_other_job(job, monkeypatch):
    first = run_id(job)
    assert first == run_id(job.model_copy(update={"log_every": 5})) and first.isalnum() and len(first) == 16
    other = job.output.parents[1] / "seed1" / "manifest.json"
    ids = {first, run_id(job.model_copy(update={"output": other, "seed": 1})), run_id(job.model_copy(update={"steps": 5}))}
    moved = job.output.parents[2] / "other" / "seed0" / "manifest.json"
    ids.add(run_id(job.model_copy(update={"output": moved})))
    monkeypatch.setenv("POSTTRAIN_WANDB_EPOCH", "1")
    assert len(ids | {run_id(job)}) == 5


def test_history(job):
    tracker = Tracker(job)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1 / step, "n": step})
    tracker.finish({"loss": 0.1})
    assert tracker.run is None and read_history(tracker.path) == [{"step": s, "loss": 1 / s, "n": float(s)} for s in (1, 2, 3)]


def test_resume_forgets_later_lines(job):
    for step in (1, 2, 3):
        Tracker(job).log(step, {"loss": float(step)})
    again = Tracker(job)
    again.rewind(2)
    again.log(3, {"loss": 9.0})
    assert [(row["step"], row["loss"]) for row in read_history(again.path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]
    again.rewind(0)
    assert read_history(again.path) == []


def test_rewind_keeps_the_bytes_of_what_stays(job):
    tracker = Tracker(job)
    tracker.log(1, {"loss": 0.1 + 0.2, "grad_norm": 1e-30})
    before = tracker.path.read_bytes()
    tracker.log(2, {"loss": 1.0})
    tracker.rewind(1)
    assert tracker.path.read_bytes() == before


@pytest.mark.parametrize("cut", ['{"st', '{"step": 3, "loss": 0.', "\0\0\0\0"])
def test_a_line_that_a_kill_cut_short_does_not_stop_the_resume(job, cut):
    tracker = Tracker(job)
    tracker.log(1, {"loss": 1.0})
    with open(tracker.path, "a") as stream:
        stream.write(cut)
    tracker.rewind(5)
    tracker.log(2, {"loss": 2.0})
    assert [row["step"] for row in read_history(tracker.path)] == [1, 2]


def test_damage_in_the_middle_is_not_hidden(job):
    tracker = Tracker(job)
    tracker.path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        read_history(tracker.path)


def test_other_ranks_write_nothing(job, monkeypatch, wandb):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "online")
    tracker = Tracker(job)
    tracker.log(1, {"loss": 1.0})
    tracker.rewind(0)
    tracker.finish({})
    assert not list(job.folder.iterdir()) and not hasattr(wandb, "options")


def test_wandb_is_not_imported_when_disabled(job, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise, and a tracker that caught that would say so
    tracker = Tracker(job)
    tracker.log(1, {"loss": 1.0})
    assert tracker.run is None and capsys.readouterr().err == ""
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "offline")
    Tracker(job)
    assert "warning: W&B" in capsys.readouterr().err


def test_what_wandb_is_told(job, monkeypatch, wandb):
    Tracker(job).log(1, {"loss": 0.5})
    plain = (job.folder / "history.jsonl").read_bytes()
    (job.folder / "history.jsonl").unlink()
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "offline")
    monkeypatch.setenv("POSTTRAIN_WANDB_GROUP", "tiny-12345678")
    monkeypatch.setenv("POSTTRAIN_WANDB_ENTITY", "")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    tracker = Tracker(job)
    tracker.log(1, {"loss": 0.5})
    tracker.finish({"validation/loss": 0.25})
    options = wandb.options
    assert (options["id"], options["resume"], options["mode"], options["entity"]) == (run_id(job), "allow", "offline", None)
    assert (options["group"], options["job_type"], options["name"]) == ("tiny-12345678", "sft", "sft/train/arm/seed0")
    assert options["tags"] == ["tiny", "sft", "train"] and options["config"]["steps"] == 100 and "output" not in options["config"]
    assert options["settings"]["disable_git"] and options["settings"]["console"] == "off"
    assert "s3cr3t" not in repr(options) and str(Path.home()) not in repr(options["config"])
    assert ("log", {"train/global_step": 1, "train/loss": 0.5}, 1, True) in wandb.calls
    assert wandb.summary == {"validation/loss": 0.25} and wandb.calls[-1] == ("finish", 0)
    assert (job.folder / "history.jsonl").read_bytes() == plain


def test_a_server_that_does_not_answer_leaves_the_run_offline(job, monkeypatch, wandb, capsys):
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "online")
    wandb.broken = {"online"}
    tracker = Tracker(job)
    assert wandb.options["mode"] == "offline" and tracker.run is wandb and ("teardown",) in wandb.calls
    said = capsys.readouterr().err
    assert said == "warning: W&B: ConnectionError: no route to host; the run is kept offline.\n"


def test_no_job_fails_because_of_wandb(job, monkeypatch, wandb, capsys):
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "offline")
    wandb.broken = {"log"}
    tracker = Tracker(job)
    for step in (1, 2):
        tracker.log(step, {"loss": 1.0})
    tracker.finish({"loss": 1.0})
    assert len(read_history(tracker.path)) == 2 and capsys.readouterr().err.count("warning") == 1  # said once
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    assert Tracker(job).run is None
    assert "only history.jsonl is written" in capsys.readouterr().err


def test_a_stopped_attempt_ends_unfinished(job, monkeypatch, wandb):
    monkeypatch.setenv("POSTTRAIN_WANDB_MODE", "offline")
    Tracker(job).stop()
    assert wandb.calls[-1] == ("finish", 75) and wandb.summary == {}
