"""What `wandb sync` would send after a study that ran offline: read back from W&B's transaction logs."""

from __future__ import annotations

import json
import re
import shlex
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.core import tracking
from posttrain.core.config import roles
from posttrain.core.manifest import identity, read
from posttrain.core.tracking import read_history
from tests.project import Project

HEADER, BLOCK = 7, 32768  # of the file, and of a record in it; records do not cross a block's end in one piece
FULL, LAST = 1, 4
KEY = "0123456789abcdef0123456789abcdef01234567"


def records(path: Path) -> Iterator:
    """Records of a .wandb file: LevelDB's log format, with W&B's own messages inside. Version 0.31 has no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, joined = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        part = data[at + HEADER : at + HEADER + length]
        assert zlib.crc32(bytes([kind]) + part) == checksum, f"{path} is damaged at byte {at}"
        joined, at = joined + part, at + HEADER + length
        if kind in (FULL, LAST):
            yield Record.FromString(joined)
            joined = b""


class Segment:
    """One attempt as W&B recorded it: .run, .rows of its history, .summary, .code of its end (None: it did not end)."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.summary, self.code = path, [], {}, None
        self.texts: list[str] = []
        for record in records(path):
            kind = record.WhichOneof("record_type")
            self.texts.append(str(record))
            if kind == "run":
                self.run = record.run
            elif kind == "history":
                self.rows.append(plain(record.history.item))
            elif kind == "summary":
                self.summary |= plain(record.summary.update)
            elif kind == "exit":
                self.code = record.exit.exit_code

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


def plain(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def segments(folder: Path) -> list[Segment]:
    """Attempts under `folder` in start order, which the names of their folders give."""
    return [Segment(path) for path in sorted(folder.rglob("offline-run-*/run-*.wandb"))]


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> Project:
    """The whole study of the tier `test`, offline."""
    found = Project(tmp_path_factory.mktemp("offline"))
    config = found.folder / "configs" / "config.yaml"
    config.write_text(config.read_text().replace("mode: disabled", "mode: offline"))
    found.run()
    return found


@pytest.fixture(scope="module")
def sent(offline) -> dict[str, Segment]:
    """{stage/method/variant: its only attempt}."""
    return {"/".join(segment.path.parts[-7:-4]): segment for segment in segments(offline.results)}


def test_every_training_job_is_a_run_of_one_group(sent):
    arms = ("sft", "pear_token")
    trained = [f"sft/train/two_style-{arm}" for arm in arms] + [f"rl/grpo/two_style-{start}" for start in ("base", *arms)]
    assert sorted(sent) == sorted(["base/scratch/two_style", *trained])
    groups = {segment.run.run_group for segment in sent.values()}
    assert len(groups) == 1 and groups.pop().startswith("test-")
    assert {segment.run.project for segment in sent.values()} == {"posttrain"}


def test_names_types_and_tags_say_which_job_it_is(sent):
    for name, segment in sent.items():
        stage, method, _ = name.split("/")
        run = segment.run
        assert (run.display_name, run.job_type, list(run.tags)) == (f"{name}/seed0", stage, ["test", stage, method])


def test_ids_are_those_of_the_jobs(offline, sent):
    from posttrain.study import config_class

    for name, segment in sent.items():
        output = offline.results / name / "seed0" / "manifest.json"
        stage, method, _, seed = identity(output)
        owner = config_class(stage, method)
        inputs = {key: "-" for key, role in roles(owner).items() if role == "input" and owner.model_fields[key].is_required()}
        found = read(output, verify=False).config
        assert segment.run.run_id == tracking.run_id(owner(**{**inputs, **found, "output": output, "seed": seed}))
        sent_config = {item.key: json.loads(item.value_json) for item in segment.run.config.update}
        assert {key: value for key, value in sent_config.items() if key != "_wandb"} == found
    assert len({segment.run.run_id for segment in sent.values()}) == len(sent)


def test_rows_are_those_of_the_local_history_at_the_same_steps(offline, sent):
    for name, segment in sent.items():
        history = read_history(offline.results / name / "seed0" / "history.jsonl")
        assert segment.steps == [row["step"] for row in history] == sorted(set(segment.steps))
        for row, local in zip(segment.rows, history, strict=True):
            assert row["train/global_step"] == local["step"]
            assert {key: row[f"train/{key}"] for key in local if key != "step"} == {k: v for k, v in local.items() if k != "step"}


def test_summary_is_the_manifest(offline, sent):
    for name, segment in sent.items():
        metrics = read(offline.results / name / "seed0" / "manifest.json", verify=False).metrics
        shown = {key: value for key, value in segment.summary.items() if not key.startswith(("train/", "_"))}
        assert shown == pytest.approx({key: metric.value for key, metric in metrics.items()}) and segment.code == 0


def test_no_weights_are_sent(sent):
    for segment in sent.values():
        for text in segment.texts:
            assert not text.startswith(("artifact", "use_artifact")) and "safetensors" not in text


def test_two_attempts_make_one_run_without_a_gap(offline, tmp_path):
    """The first attempt is stopped by its time limit; the second resumes from the checkpoint that it left."""
    output = tmp_path / "results/test/sft/train/two_style-arm/seed0/manifest.json"
    words = ["-m", "posttrain.sft.train", "--start", str(offline.results / "base/scratch/two_style/seed0/manifest.json")]
    words += ["--traces", str(offline.results / "sft/traces/two_style/seed0/manifest.json"), "--output", str(output)]
    words += ["--steps", "6", "--batch-size", "16", "--checkpoint-every", "2"]
    environment = {"POSTTRAIN_WANDB_MODE": "offline", "POSTTRAIN_WANDB_GROUP": "g"}
    stopped = offline.call(*words, "--max-minutes", "0.0001", **environment)
    assert stopped.returncode == 75, stopped.stderr[-2000:]
    assert offline.call(*words, **environment).returncode == 0
    first, second = segments(tmp_path)
    assert (first.code, second.code) == (75, 0)
    assert first.run.run_id == second.run.run_id and first.run.start_time.seconds < second.run.start_time.seconds
    assert first.steps[0] == 1 and first.steps[-1] < 6 and second.steps[0] == first.steps[-1] + 1
    assert first.steps + second.steps == list(range(1, 7))  # no step twice: replayed in order, nothing is overwritten
    assert "drift" not in first.summary and "drift" in second.summary


def test_a_server_that_cannot_be_reached_costs_seconds_not_the_job(offline, tmp_path):
    output = tmp_path / "results/test/sft/train/two_style-sft/seed0/manifest.json"
    source = offline.results / "sft/train/two_style-sft/seed0/manifest.json"
    words = json.loads((source.parent / "provenance.json").read_text())["command"][2:]
    words[words.index("--output") + 1] = str(output)
    started = time.monotonic()
    done = offline.call(
        "-m",
        "posttrain.sft.train",
        *words,
        POSTTRAIN_WANDB_MODE="online",
        WANDB_BASE_URL="http://127.0.0.1:9",  # nothing listens there
        WANDB_API_KEY=KEY,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - started < 120
    assert output.read_bytes() == source.read_bytes()
    assert done.stderr.count("warning: W&B") == 1 and "the run is kept offline" in done.stderr and KEY not in done.stderr
    (kept,) = segments(tmp_path)
    assert kept.steps == list(range(1, 13))  # `wandb sync` still has all of it


def test_artifacts_and_their_links_are_the_rule_graph(offline):
    """The lineage that W&B would be sent, from the manifests, against the edges of Snakemake's own graph of jobs."""
    table = offline.results / "report" / "wandb_sync.tsv"
    done = offline.snakemake("wandb_sync")
    assert done.returncode != 0 and "needs a key" in done.stdout + done.stderr and not table.exists()
    planned = offline.snakemake("-n", "--force", "wandb_sync", "--printshellcmds")
    (command,) = {line.strip() for line in (planned.stdout + planned.stderr).splitlines() if "report.wandb_sync" in line}
    words = shlex.split(command.split(" -- ")[1].split(" > ")[0])[1:]
    assert offline.call("-m", "posttrain.report.wandb_sync", *words, "--dry-run", "true").returncode == 0
    rows = [line.split("\t") for line in table.read_text().splitlines()[1:]]
    sent = {(used.rpartition(":")[0], name) for name, _, _, uses in rows for used in uses.split()}

    planned = offline.snakemake("-n", "--forceall", "wandb_sync", "--printshellcmds")
    name = {str(Path("results/test", *i, "manifest.json")): f"test-{'-'.join(i)}" for i in identities(offline.results)}
    graph, made = set(), []
    for line in (planned.stdout + planned.stderr).splitlines():
        paths = re.findall(r"results/test/\S*?manifest\.json", line) if " --output " in line else []
        output = re.search(r"--output (\S+)", line)
        if output and output[1] in name:
            made.append(name[output[1]])
            graph |= {(name[path], name[output[1]]) for path in paths if path != output[1]}
    assert len(made) == len(rows) > 10 and sent == graph and sorted(row[0] for row in rows) == sorted(made)
    table.unlink()


def test_artifacts_for_a_server_that_cannot_be_reached_are_one_sentence(offline):
    found = str(next(offline.results.glob("data/tasks/*/seed0/manifest.json")))
    words = ["--root", str(offline.results), "--targets", json.dumps([found]), "--output", str(offline.results / "report/x.tsv")]
    started = time.monotonic()
    online = {"POSTTRAIN_WANDB_MODE": "offline", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}
    done = offline.call("-m", "posttrain.report.wandb_sync", *words, **online)
    assert done.returncode == 2 and time.monotonic() - started < 120
    assert "error: W&B did not take an artifact" in done.stderr and "goes on where it stopped" in done.stderr
    assert KEY not in done.stderr and "Traceback" not in done.stderr and not (offline.results / "report/x.tsv").exists()


def identities(root: Path) -> list[tuple[str, ...]]:
    """(stage, method, variant, seed<k>) of every finished job."""
    return [path.relative_to(root).parts[:-1] for path in root.glob("*/*/*/seed*/manifest.json")]
