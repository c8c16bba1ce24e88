"""The contract between rules: what is written, when, and what a reader refuses."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import manifest
from posttrain.core.config import JobConfig, digest, key
from posttrain.core.errors import UserError


class Config(JobConfig):
    depth: int = key(1, help="setting")
    workers: int = key(0, help="runtime", role="runtime")
    start: Path | None = key(None, help="one input", role="input")
    parts: dict[str, Path] = key({}, help="inputs by name", role="input")
    several: tuple[Path, ...] = key((), help="inputs in order", role="input")


@pytest.fixture
def output(tmp_path) -> Path:
    path = tmp_path / "results" / "tiny" / "sft" / "train" / "two_style-arm" / "seed3" / "manifest.json"
    path.parent.mkdir(parents=True)
    return path


def job(output: Path, **values) -> Config:
    return Config(**{"output": output, "seed": 3, **values})


def artifact(output: Path, name: str = "model/weights.bin", text: str = "weights") -> Path:
    path = output.parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(path: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        manifest.read(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip(output):
    file = artifact(output)
    metrics = {"loss": 0.5, "accuracy": manifest.metric([1, 0, 1])}
    written = manifest.publish(job(output), metrics, [file], card={"licence": "MIT"}, not_deterministic="atomics")
    found = manifest.read(output)
    assert found == written and found.identity == "sft/train/two_style-arm/seed3"
    assert found.metrics["accuracy"].n == 3 and found.metrics["loss"] == manifest.Metric(value=0.5)
    assert found.artifacts == {"model/weights.bin": manifest.Artifact(sha256=manifest.sha256(file), size=7)}
    assert found.config == {"depth": 1, "seed": 3} and found.config_digest == digest(found.config)
    assert found.card == {"licence": "MIT"} and found.not_deterministic == "atomics" and found.packages["numpy"] == np.__version__


def test_identical_rerun_writes_an_identical_file(output, monkeypatch):
    file = artifact(output)
    manifest.publish(job(output), {"b": 1.0, "a": 2.0}, [file], card={"y": 1, "x": {"d": 1, "c": 2}}, timings={"generate": 1.0})
    first, provenance = output.read_bytes(), json.loads((output.parent / "provenance.json").read_text())
    monkeypatch.setenv("SOME_TOKEN", "other")
    monkeypatch.setattr("time.time", lambda: 4e9)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    manifest.publish(
        job(output, workers=4),
        {"a": 2.0, "b": 1.0},
        [file, file],
        card={"x": {"c": 2, "d": 1}, "y": 1},
        timings={"generate": 9.0},
    )
    again = json.loads((output.parent / "provenance.json").read_text())
    assert output.read_bytes() == first
    assert again["host"] == "elsewhere" != provenance["host"] and again["timings"] == {"generate": 9.0}


@pytest.mark.parametrize("change", [{"depth": 2}, {"metric": 0.6}, {"text": "other"}, {"input": "y"}])
def test_what_changes_a_result_changes_the_file(output, tmp_path, change):
    start = tmp_path / "start.json"

    def publish(depth=1, metric=0.5, text="weights", input="x"):
        start.write_text(input)
        manifest.publish(job(output, depth=depth, start=start), {"m": metric}, [artifact(output, text=text)])
        return output.read_bytes()

    assert publish() == publish() != publish(**change)


def test_no_secret_of_the_environment_is_written(output, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3t")
    manifest.publish(job(output), {"m": 1.0})
    for file in output.parent.iterdir():
        assert "s3cr3t" not in file.read_text()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metric_that_is_not_finite_is_named_and_nothing_is_written(output, value):
    with pytest.raises(UserError, match=r"metric loss of .* is "):
        manifest.publish(job(output), {"fine": 1.0, "loss": value})
    assert list(output.parent.iterdir()) == []


def test_seed_must_match_the_folder(output):
    with pytest.raises(UserError, match="--seed 4 and the folder seed3"):
        manifest.publish(job(output, seed=4), {})


def test_a_large_manifest_is_refused(output):
    with pytest.raises(UserError, match="move per-item values to a parquet artifact"):
        manifest.publish(job(output), {f"metric/{i:08d}": 1.0 for i in range(20_000)})
    assert not output.exists()
    manifest.publish(job(output), {f"metric/{i:08d}": 1.0 for i in range(2000)})
    assert output.stat().st_size < manifest.MAX_BYTES


def test_only_rank_0_writes(output, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert manifest.publish(job(output), {"m": 1.0}).metrics["m"].value == 1.0
    assert list(output.parent.iterdir()) == []


def test_inputs_are_recorded_by_content(output, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in "abcd"}
    for name, path in files.items():
        path.write_text(name)
    one = job(output, start=files["a"], parts={"x": files["b"]}, several=(files["c"], files["d"]))
    found = manifest.publish(one, {}).inputs
    assert found == {
        "parts.x": manifest.sha256(files["b"]),
        "several.0": manifest.sha256(files["c"]),
        "several.1": manifest.sha256(files["d"]),
        "start": manifest.sha256(files["a"]),
    }
    assert manifest.publish(job(output), {}).inputs == {}


# --- reading --------------------------------------------------------------------------------------------------


def test_changed_truncated_and_missing_artifacts_are_named(output):
    file = artifact(output)
    manifest.publish(job(output), {}, [file])
    file.write_text("weightz")  # the same size
    assert f"{file} differs from what {output} records" in refused(output)
    file.write_text("weight")
    assert f"{file} differs" in refused(output)
    file.unlink()
    assert f"{file} is missing" in refused(output)
    assert manifest.read(output, verify=False).stage == "sft"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe", b'{"stage": 1}'])
def test_what_is_no_manifest(output, text):
    output.write_bytes(text)
    assert refused(output).startswith(f"{output} is not a manifest (")


def test_truncated_manifest(output):
    manifest.publish(job(output), {"m": 1.0})
    whole = output.read_text()
    for size in (1, len(whole) // 2, len(whole) - 3):
        output.write_text(whole[:size])
        assert "is not a manifest" in refused(output)


def test_missing_manifest(output):
    assert refused(output) == f"{output} does not exist; build it with `snakemake {output}`."


def test_another_schema_version_is_named_though_its_fields_differ(output):
    output.write_text(json.dumps({"schema_version": 99, "unheard": "of"}))
    assert "has schema version 99, this code reads 1" in refused(output)


# --- parts ----------------------------------------------------------------------------------------------------


def test_write_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    manifest.write_atomically(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            manifest.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    manifest.write_atomically(path, "né\n")
    assert path.read_bytes() == "né\n".encode()


def test_manifest_is_written_after_everything_else(output, monkeypatch):
    order = []
    write = manifest.write_atomically
    monkeypatch.setattr(manifest, "write_atomically", lambda path, text: (order.append(path.name), write(path, text)))
    manifest.publish(job(output), {})
    assert order == ["provenance.json", "manifest.json"]


def test_identity():
    assert manifest.identity(Path("results/tiny/rl/grpo/a-b/seed12/manifest.json")) == ("rl", "grpo", "a-b", 12)


@pytest.mark.parametrize(
    "path",
    [
        "manifest.json",
        "grpo/a/seed0/manifest.json",
        "rl/grpo/a/seed0/other.json",
        "rl/grpo/a/0/manifest.json",
        "rl/grpo/a/seed/manifest.json",
        "rl/grpo/a/seedx/manifest.json",
        "rl/grpo/a/seed-1/manifest.json",
        "-",
    ],
)
def test_identity_of_other_paths_is_a_sentence(path):
    with pytest.raises(UserError, match="give a path that ends in <stage>/<method>/<variant>/seed<k>/manifest"):
        manifest.identity(Path(path))


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_metric_is_mean_and_standard_error(values):
    found = manifest.metric(values)
    assert found.n == len(values)
    assert math.isclose(found.value, np.mean(values), rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(found.se, np.std(values, ddof=1) / math.sqrt(len(values)), rel_tol=1e-6, abs_tol=1e-6)


def test_metric_edges():
    assert manifest.metric([True]) == manifest.Metric(value=1.0, n=1, se=None)
    assert manifest.metric([2, 2, 2]) == manifest.Metric(value=2.0, n=3, se=0.0)
    assert manifest.metric(iter([1.0, 3.0])).value == 2.0
    with pytest.raises(UserError, match="zero items is undefined"):
        manifest.metric([])


def test_sha256_of_a_known_text(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert manifest.sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
