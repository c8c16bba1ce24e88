"""What `make why` says after an edit: the reason in words, the jobs that have it, and how many only follow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time

import pytest

from posttrain import why
from posttrain.core import codes

PEAR = ("configs/test/sft.yaml", "{weighting: pear_token}", "{weighting: pear_token, gamma: 0.9}")
LOSSES = ("src/posttrain/sft/losses.py", "(1.0 - p.sum(-1)).clamp(min=0.0)", "(1.0 - p.sum(-1)).clamp(min=1e-12)")
EVALUATION = "results/test/evaluate/reasoning/two_style-sft_sft/seed0/manifest.json"


def said(project, *words: str) -> str:
    done = project.call("-m", "posttrain.why", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listed(text: str) -> dict[str, list[str]]:
    """{reason: jobs}; what only follows is under 'follow'."""
    found: dict[str, list[str]] = {}
    for block in text.strip().split("\n\n")[1:]:
        head, *jobs = block.splitlines()
        found["follow" if re.match(r"\d+ jobs? only follow", head) else head] = [job.strip() for job in jobs]
    return found


@contextlib.contextmanager
def away(project, name: str):
    """Without a file for a while; its time stamp comes back."""
    path = project.folder / name
    hidden = path.with_name("away")
    path.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(path)


def test_nothing_to_do(project):
    start = time.time()
    assert said(project) == "Nothing to do: every result is up to date.\n"
    assert time.time() - start < 60  # a few seconds alone


def test_a_pear_key_names_its_values_and_its_job_alone(project):
    with project.edited(*PEAR):
        text = said(project)
    assert text.startswith("7 jobs would run.\n")
    found = listed(text)
    assert set(found.pop("follow")) == {
        "rl_grpo 1, by sft_train",
        "evaluate_reasoning 2, by rl_grpo, sft_train",
        "claims 1, by evaluate_reasoning",
        "plots 1, by evaluate_reasoning",
        "page 1, by claims, evaluate_reasoning, plots",
    }
    assert found == {"settings changed: gamma 0.999 → 0.9:": ["SFT pear_token on two_style (seed 0)"]}


def test_a_module_is_named(project):
    with project.edited(*LOSSES):
        found = listed(said(project))
    (reason,) = found.keys() - {"follow"}
    assert reason.startswith("code changed: sft.losses")
    assert sorted(found[reason]) == [
        "SFT pear_token on two_style (seed 0)",
        "SFT sft on two_style (seed 0)",
        "Time PEAR weights against SFT on two_style (seed 0)",
    ]


def test_settings_of_a_job_that_follows_anyway_are_not_hidden(project):
    """Snakemake itself names only the input that will be rebuilt."""
    with project.edited("configs/test/data.yaml", "train: 256", "train: 260"), project.edited(*PEAR):
        found = listed(said(project))
    assert found["settings changed: train 256 → 260:"] == ["Generate verifiable items: two_style (seed 0)"]
    reason = "settings changed: gamma 0.999 → 0.9, and an input will be rebuilt:"
    assert found[reason] == ["SFT pear_token on two_style (seed 0)"]
    assert set(found) == {"settings changed: train 256 → 260:", reason, "follow"}


def test_an_output_deleted(project):
    with away(project, EVALUATION):
        found = listed(said(project))
        alone = said(project, "--target", EVALUATION)
    assert found["output missing: it was deleted:"] == ["Evaluate sft_sft on two_style (seed 0)"]
    assert {line.split()[0] for line in found["follow"]} == {"claims", "plots", "page"}
    assert listed(alone) == {"output missing: it was deleted:": ["Evaluate sft_sft on two_style (seed 0)"]}


def test_a_job_killed_before_it_finished(project):
    """Snakemake's mark of a job that has begun stays behind when it is killed with its driver."""
    mark = project.folder / why.record_path("incomplete", EVALUATION)
    assert (project.folder / why.record_path("metadata", EVALUATION)).is_file()
    mark.write_text("")
    try:
        with away(project, EVALUATION):
            found = listed(said(project))
    finally:
        mark.unlink()
    assert found["killed before it finished:"] == ["Evaluate sft_sft on two_style (seed 0)"]


def test_a_failed_job_points_to_its_log(project):
    log = project.folder / "logs/test/evaluate/reasoning/two_style-sft_sft.seed0.log"
    stat = log.stat()
    os.utime(log, (time.time() + 10, time.time() + 10))
    try:
        with away(project, EVALUATION):
            found = listed(said(project))
    finally:
        os.utime(log, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert found["output missing: its last run failed, see its log in logs/:"] == ["Evaluate sft_sft on two_style (seed 0)"]


def test_a_seed_added(project):
    found = listed(said(project, "--seeds", "0,1"))
    assert found["output missing: seed 1 is new:"] == ["Generate verifiable items: two_style (seed 1)"]
    (report,) = found.keys() - {"output missing: seed 1 is new:", "follow"}
    assert report == "settings changed: seeds [0] → [0,1], and an input will be rebuilt:"
    assert len(found[report]) == 3
    assert {"sft_train 2", "rl_grpo 3", "evaluate_reasoning 6"} <= {line.partition(",")[0] for line in found["follow"]}


def test_a_claim_edited(project):
    with project.edited("configs/claims.yaml", "smallest_effect: 0.05", "smallest_effect: 0.06"):
        found = listed(said(project, "--target", "claims"))
    assert found == {"input changed: configs/claims.yaml:": ["Write the claims ledger"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tier", "tset"], "did you mean 'test'?"),
        (["--seeds", "x"], "--seeds x: give whole numbers"),
        (["--target", "nowhere"], "No rule to produce nowhere"),
    ],
)
def test_bad_input_is_one_sentence(project, words, message):
    done = project.call("-m", "posttrain.why", *words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


# --- without a project ---


def test_modules_of_a_commit_are_exact(tmp_path, monkeypatch):
    """The commit counts only if it holds the code that ran, and then it names what changed, whatever the time stamps."""

    def git(*words) -> str:
        call = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words]
        return subprocess.run(call, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "posttrain"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "a": "from posttrain import b, c\n", "b": "X = 1\n", "c": "Y = 1\n"}.items():
        (package / f"{name}.py").write_text(text)
    git("init")
    git("add", "-A")
    git("commit", "-m", "then")
    ran = codes.code_digest("posttrain.a", package)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "provenance.json").write_text(json.dumps({"commit": git("rev-parse", "HEAD")}))
    (package / "b.py").write_text("X = 2\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "past").mkdir()
    past = why.Past(tmp_path / "results", tmp_path / "past")
    then, now = past.closure("posttrain.a", ran), codes.closure("posttrain.a", package)
    assert {name for name in now if now[name] != then[name]} == {"posttrain.b"}
    assert past.closure("posttrain.a", codes.code_digest("posttrain.a", package)) is None


def test_long_paths_are_stored_in_parts():
    parts = why.record_path("metadata", "results/" + "x" * 400 + "/manifest.json").parts
    assert parts[:2] == (".snakemake", "metadata") and all(len(part) <= 255 for part in parts)
    assert all(part.startswith("@") for part in parts[2:-1]) and len(parts) > 3


def test_seeds_share_a_line():
    assert why.merged(["A (seed 10)", "A (seed 2)", "B (seed 0)", "C"]) == ["A (seeds 2, 10)", "B (seed 0)", "C"]


def test_flags_of_a_command():
    assert why.flags(["m", "--clip-delta=[-1,0.5]", "--seed", "0", "--last"]) == {
        "clip_delta": "[-1,0.5]",
        "seed": "0",
        "last": "",
    }
