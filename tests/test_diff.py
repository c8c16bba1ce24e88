"""What `make diff` says of manifests made by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import diff
from posttrain.core import config as configs

JOB = "sft/train/two_style-sft/seed0"


def write(folder: Path, job: str = JOB, **changed) -> Path:
    """A manifest at folder/job; `changed` replaces or, for mappings, adds to what it holds."""
    stage, method, variant, seed = job.split("/")
    content = {
        "stage": stage,
        "method": method,
        "variant": variant,
        "seed": int(seed.removeprefix("seed")),
        "config": {"steps": 12, "learning_rate": 1e-3, "seed": int(seed.removeprefix("seed")), "shape": {"hidden": 16}},
        "inputs": {"start": "a" * 64},
        "artifacts": {"model/model.safetensors": {"sha256": "c" * 64, "size": 3}},
        "metrics": {
            "pass@1": {"value": 0.5, "n": 100, "se": 0.03},
            "drift": {"value": 1.0, "n": None, "se": None},
        },
        "card": {"license": "MIT"},
        "device": "cpu",
        "packages": {"torch": "2.8.0"},
    }
    for name, value in changed.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    path = folder / job / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"config_digest": configs.digest(content["config"])}))
    return path


def rows(a: Path, b: Path) -> list[tuple]:
    return [(r.manifest, r.section, r.key, r.a, r.b) for r in diff.compare_paths(str(a), str(b)).rows]


def test_equal(tmp_path, capsys):
    for side in "ab":
        write(tmp_path / side)
        write(tmp_path / side, "rl/grpo/two_style-sft/seed0")
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "no differences in 2 manifests\n"
    assert diff.main([str(tmp_path / "a" / JOB), str(tmp_path / "b" / JOB / "manifest.json")]) == 0
    assert capsys.readouterr().out == "no differences in 1 manifest\n"


def test_numbers_written_otherwise_are_equal(tmp_path):
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    other.write_text(other.read_text().replace('"steps": 12', '"steps": 12.0'))
    assert rows(one, other) == []


def test_keys_that_differ_stand_in_order(tmp_path):
    one = write(tmp_path / "a")
    other = write(
        tmp_path / "b",
        metrics={"drift": {"value": 2.0}},
        packages={"torch": "2.9.0"},
        artifacts={"model/model.safetensors": {"sha256": "d" * 64, "size": 3}},
        card={"license": "Apache-2.0"},
        inputs={"start": "b" * 64},
        config={"shape": {"hidden": 32}, "gamma": 0.9},
    )
    assert rows(one, other) == [
        ("", "config", "gamma", None, 0.9),
        ("", "config", "shape.hidden", 16, 32),
        ("", "data", "card.license", "MIT", "Apache-2.0"),
        ("", "data", "inputs.start", "a" * 64, "b" * 64),
        ("", "packages", "torch", "2.8.0", "2.9.0"),
        ("", "artifact", "model/model.safetensors", "c" * 64, "d" * 64),
        ("", "metric", "drift", 1.0, 2.0),
    ]


def test_two_jobs_of_different_identity(tmp_path):
    found = rows(write(tmp_path), write(tmp_path, "sft/train/two_style-dft/seed1"))
    assert found == [("", "job", "variant", "two_style-sft", "two_style-dft"), ("", "config", "seed", 0, 1)]


def test_a_metric_in_standard_errors(tmp_path, capsys):
    """(0.75 - 0.5) / hypot(0.03, 0.04) = 0.25 / 0.05 = 5; without any standard error there is no such number."""
    one = write(tmp_path / "a")
    other = write(tmp_path / "b", metrics={"pass@1": {"value": 0.75, "n": 100, "se": 0.04}, "drift": {"value": 3.0}})
    drift, passed = diff.compare_paths(str(one), str(other)).rows
    assert (drift.difference, drift.in_se) == (2.0, None)
    assert passed.difference == 0.25 and passed.in_se == pytest.approx(5)
    assert diff.main([str(one), str(other)]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "pass@1" in line)
    assert line.split() == ["metric", "pass@1", "0.5", "0.75", "+0.25", "+5.0"]


def test_the_same_value_over_other_items_differs(tmp_path):
    other = write(tmp_path / "b", metrics={"pass@1": {"value": 0.5, "n": 400, "se": 0.015}})
    assert rows(write(tmp_path / "a"), other) == [
        ("", "metric", "pass@1 (n)", 100, 400),
        ("", "metric", "pass@1 (se)", 0.03, 0.015),
    ]


def test_a_metric_that_one_side_lacks(tmp_path):
    other = write(tmp_path / "b", metrics={"weights/ess": {"value": 0.6}})
    (row,) = diff.compare_paths(str(write(tmp_path / "a")), str(other)).rows
    assert (row.key, row.a, row.b, row.difference, row.in_se) == ("weights/ess", None, 0.6, None, None)


def test_folders_match_by_path_with_configuration_first(tmp_path, capsys):
    rl, other = "rl/grpo/two_style-sft/seed0", "sft/train/two_style-dft/seed0"
    for side, steps, drift in (("a", 12, 1.0), ("b", 13, 2.0)):
        write(tmp_path / side, config={"steps": steps})
        write(tmp_path / side, rl, metrics={"drift": {"value": drift}})
    write(tmp_path / "a", other)
    write(tmp_path / "b", "sft/train/two_style-sft/seed1")
    assert rows(tmp_path / "a", tmp_path / "b") == [(JOB, "config", "steps", 12, 13), (rl, "metric", "drift", 1.0, 2.0)]
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert f"only in A: {other}\n" in out and "only in B: sft/train/two_style-sft/seed1\n" in out
    assert out.endswith("2 differences in 2 of 2 manifests; 1 only in A, 1 only in B\n")


def test_only_in_one_is_a_difference(tmp_path, capsys):
    for side in "ab":
        write(tmp_path / side)
    write(tmp_path / "a", "rl/grpo/two_style-sft/seed0")
    assert diff.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.endswith("no difference in any of 1 manifest; 1 only in A, 0 only in B\n")


def test_values_stay_readable(tmp_path):
    """Digests by their start, long values from where they differ, close numbers in full."""
    row = diff.Row("", "artifact", "model.safetensors", "c" * 64, "d" * 64)
    assert diff.pair(row) == ("c" * 12, "d" * 12)
    assert diff.pair(diff.Row("", "metric", "x", 0.12345678, 0.12345679)) == ("0.12345678", "0.12345679")
    one, other = diff.pair(diff.Row("", "config", "x", "same " * 20 + "left", "same " * 20 + "right"))
    assert one.endswith("left") and other.endswith("right") and max(len(one), len(other)) <= diff.WIDTH


def test_json(tmp_path, capsys):
    arguments = [str(write(tmp_path / "a")), str(write(tmp_path / "b", config={"steps": 13})), "--json"]
    assert diff.main(arguments) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["compared"] == 1 and found["only_in_a"] == found["only_in_b"] == []
    assert [(row["section"], row["key"], row["a"], row["b"]) for row in found["rows"]] == [("config", "steps", 12, 13)]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("", "a", "A is not given; name two manifests or two folders"),
        ("a", "nowhere", "B: .*nowhere does not exist; give a manifest.json or a folder of results"),
        ("a", "empty", "B: the folder .*empty holds no manifest.json; give a folder of results"),
        ("a", f"a/{JOB}", "seed0 is one manifest and .*a a folder of several; give two manifests or two folders"),
        ("broken", f"a/{JOB}", "broken is not a manifest"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, a, b, message):
    write(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").write_text("{")
    assert diff.main([str(tmp_path / a) if a else a, str(tmp_path / b)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)


def test_needs_no_torch(tmp_path):
    code = "import sys; from posttrain import diff; diff.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = [str(write(tmp_path / "a")), str(write(tmp_path / "b"))]
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False).returncode == 0
