"""Bad input: one sentence that names the key, file or row and the remedy, before any job starts where possible."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG_ERRORS = {
    "claim with a misspelt arm": (
        "configs/claims.yaml",
        "arm: rl_pear_block",
        "arm: rl_pear_blok",
        "pear.block_gain_two_style: no tier has 'rl_pear_blok'; did you mean 'rl_pear_block'?",
    ),
    "claim with a misspelt task": (
        "configs/claims.yaml",
        "task: two_style",
        "task: twostyle",
        "no tier has the task 'twostyle'; did you mean 'two_style'?",
    ),
    "claim with a misspelt key": (
        "configs/claims.yaml",
        "smallest_effect:",
        "smalest_effect:",
        "smalest_effect is not a known key; did you mean 'smallest_effect'?",
    ),
    "claim with a misspelt weighting": (
        "configs/claims.yaml",
        "arm: pear_block",
        "arm: pear_blok",
        "pear.overhead_block: no tier has 'pear_blok'; did you mean 'pear_block'?",
    ),
    "schedule that is none": (
        "configs/test/rl.yaml",
        "learning_rate: 0.001",
        "schedule: cosin",
        "grpo.defaults.schedule = 'cosin'",
    ),
    "name that cannot stand in a path": (
        "configs/test/sft.yaml",
        "    pear_token: {",
        "    pear-token: {",
        "train.arm: the name 'pear-token' may hold a to z, 0 to 9 and _ only",
    ),
    "unknown key": (
        "configs/test/sft.yaml",
        "{steps: 12,",
        "{stepz: 12,",
        "configs/test/sft.yaml: train.defaults.stepz is not a known key; did you mean 'steps'?",
    ),
    "misspelt method": (
        "configs/test/rl.yaml",
        "grpo:",
        "grpoo:",
        "configs/test/rl.yaml: grpoo is not a known key; did you mean 'grpo'?",
    ),
    "misspelt weighting": (
        "configs/test/sft.yaml",
        "weighting: pear_token",
        "weighting: pear_tokens",
        "configs/test/sft.yaml: train.arm.pear_token.weighting = 'pear_tokens'",
    ),
    "wrong type": (
        "configs/test/sft.yaml",
        "{steps: 12,",
        "{steps: many,",
        "train.defaults.steps = 'many': input should be a valid integer",
    ),
    "text where a number belongs": (
        "configs/test/rl.yaml",
        "learning_rate: 0.001",
        "learning_rate: 1.0 e-5",
        "grpo.defaults.learning_rate = '1.0 e-5'",
    ),
    "a negative number": (
        "configs/test/rl.yaml",
        "learning_rate: 0.001",
        "learning_rate: -1e-3",
        "grpo.defaults.learning_rate = -0.001",
    ),
    "a key twice": (
        "configs/test/rl.yaml",
        "defaults: {steps: 4,",
        "defaults: {steps: 4, steps: 5,",
        "configs/test/rl.yaml:3: key 'steps' stands twice",
    ),
    "broken YAML": (
        "configs/test/rl.yaml",
        "defaults: {steps: 4,",
        "defaults: {steps: 4, ]",
        "configs/test/rl.yaml:3: not valid YAML",
    ),
    "contradiction": (
        "configs/test/rl.yaml",
        "generations: 4",
        "generations: 3",
        "batch_size 16 is not a multiple of generations 3; change one of them",
    ),
    "contradiction between samples and k": (
        "configs/test/evaluate.yaml",
        "samples: 8",
        "samples: 4",
        "k = [1, 8] needs at least 8 samples, samples is 4",
    ),
    "reference to nothing": (
        "configs/test/sft.yaml",
        "traces: sft/traces/two_style",
        "traces: sft/tracez/two_style",
        "reference 'sft/tracez/two_style' is not <stage>/<method>/<variant>",
    ),
    "reference to an unknown variant": (
        "configs/test/base.yaml",
        "mix: data/mix/two_style",
        "mix: data/mix/two_stile",
        "mix.mix has no entry 'two_stile'; did you mean 'two_style'?",
    ),
    "negative seed": (
        "configs/config.yaml",
        "seeds: [0]",
        "seeds: [-1]",
        "configs/config.yaml: seeds.0 = -1: input should be greater than or equal to 0",
    ),
    "no seeds": ("configs/config.yaml", "seeds: [0]", "seeds: []", "configs/config.yaml: seeds = []"),
    "unknown top-level key": (
        "configs/config.yaml",
        "seeds: [0]",
        "seedz: [0]",
        "seedz is not a known key; did you mean 'seeds'?",
    ),
    "missing tier folder": (
        "configs/config.yaml",
        "tier: test",
        "tier: tinny",
        "the folder configs/tinny does not exist; did you mean 'tiny'?",
    ),
    "missing stage file": ("configs/config.yaml", "tier: test", "tier: half", "configs/half/data.yaml does not exist"),
    "W&B mode": ("configs/config.yaml", "mode: disabled", "mode: onlin", "wandb.mode = 'onlin'"),
    "W&B online without a key": (
        "configs/config.yaml",
        "mode: disabled",
        "mode: online",
        "wandb.mode = online needs a key: run `wandb login`",
    ),
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_configuration_errors_come_before_the_dag(project, name):
    path, old, new, message = CONFIG_ERRORS[name]
    (project.folder / "configs/half").mkdir(exist_ok=True)
    with project.edited(path, old, new):
        done = project.snakemake("-n", HOME="/nonexistent", WANDB_API_KEY="", NETRC="/nonexistent/netrc")
    text = done.stdout + done.stderr
    assert done.returncode != 0 and message in text, text[-1500:]
    assert "Traceback (most recent call last)" not in text and "Job 1" not in text


def test_scientific_notation_is_a_number(project):
    from posttrain.study import Study

    with project.edited("configs/test/rl.yaml", "learning_rate: 0.001", "learning_rate: 1e-5"):
        study = Study({"tier": "test"}, folder=project.folder / "configs")
        found = study.config("rl", "grpo", ("two_style", "base"), seed=0, inputs={"start": "a", "task": "b"}).learning_rate
    assert found == 1e-5


def test_gpu_cap_below_the_largest_job(project):
    with project.edited("configs/test/rl.yaml", "grpo:\n", "grpo:\n  resources: {gpus: 8, nodes: 2}\n"):
        done = project.snakemake("-n", "--resources", "gpu=4")
    assert "rl/grpo asks for 16 GPUs, the profile's cap is gpu: 4" in done.stdout + done.stderr


def module(project, name: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    return project.call("-m", name, *flags, **environment)


def sft_flags(project, output: Path, **changed: str) -> list[str]:
    flags = {
        "start": "results/test/base/scratch/two_style/seed0/manifest.json",
        "traces": "results/test/sft/traces/two_style/seed0/manifest.json",
        "steps": "2",
        "batch_size": "8",
        "output": str(output / "sft/train/a/seed0/manifest.json"),
        "seed": "0",
    }
    return [word for name, value in (flags | changed).items() for word in (f"--{name.replace('_', '-')}", value)]


def copy_of(project, reference: str, folder: Path) -> Path:
    target = folder / reference / "seed0"
    shutil.copytree(project.results / reference / "seed0", target)
    return target / "manifest.json"


def forge(path: Path) -> None:
    """Make a manifest agree again with the changed files beside it."""
    from posttrain.core import manifest

    found = json.loads(path.read_text())
    for name in found["artifacts"]:
        file = path.parent / name
        found["artifacts"][name] = {"sha256": manifest.sha256(file), "size": file.stat().st_size}
    path.write_text(json.dumps(found))


def fails(done: subprocess.CompletedProcess, *parts: str, code: int = 2) -> None:
    assert done.returncode == code, done.stdout[-1000:] + done.stderr[-1000:]
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert all(part in sentence for part in parts), sentence
    assert "Traceback" not in done.stderr


def test_unknown_flag_and_missing_flag(project, tmp_path):
    fails(
        module(project, "posttrain.sft.train", "--learning-rat", "1"),
        "--learning-rat is not a flag",
        "did you mean '--learning-rate'?",
    )
    fails(module(project, "posttrain.sft.train", "--output", str(tmp_path / "x")), "start is required")


def test_empty_data_file(project, tmp_path):
    import pyarrow.parquet as pq

    path = copy_of(project, "sft/traces/two_style", tmp_path)
    file = path.parent / "traces.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    forge(path)
    fails(module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, traces=str(path))), "traces.parquet has no rows")
    file.write_bytes(b"")
    forge(path)
    fails(
        module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, traces=str(path))),
        "traces.parquet is not a readable parquet file",
    )


def test_log_probability_count_differs_from_tokens(project, tmp_path):
    from posttrain.core import tables

    path = copy_of(project, "sft/traces/two_style", tmp_path)
    rows = tables.read(path.parent / "traces.parquet")
    rows[5]["logp_beta"].pop()
    tables.write(rows, path.parent / "traces.parquet")
    forge(path)
    done = module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, traces=str(path)))
    fails(done, "traces.parquet row 5: 8 behaviour log-probabilities for 9 response tokens", "score these traces again")


def test_traces_of_another_tokenizer(project, tmp_path):
    from posttrain.core import tables

    path = copy_of(project, "sft/traces/two_style", tmp_path)
    rows = tables.read(path.parent / "traces.parquet")
    rows[0]["response_ids"][0] = 99
    tables.write(rows, path.parent / "traces.parquet")
    forge(path)
    done = module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, traces=str(path)))
    fails(done, "holds the token id 99", "take traces that were made with this model's tokenizer")


def test_truncated_checkpoint(project, tmp_path):
    path = copy_of(project, "base/scratch/two_style", tmp_path)
    weights = path.parent / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    done = module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, start=str(path)))
    fails(done, "model.safetensors differs from what", "delete the manifest and run `snakemake")


def test_missing_and_broken_manifest(project, tmp_path):
    fails(
        module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, traces=str(tmp_path / "no.json"))),
        "no.json does not exist",
        "build it with",
    )
    broken = tmp_path / "broken.json"
    broken.write_text('{"stage": ')
    fails(
        module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, traces=str(broken))),
        "broken.json is not a manifest",
        "delete it",
    )


def test_nan_loss(project, tmp_path):
    flags = sft_flags(project, tmp_path, learning_rate="1e30", max_grad_norm="1e30", warmup="0", steps="5")
    fails(module(project, "posttrain.sft.train", *flags), "at step", "lower learning_rate", "No result was written")
    assert not list(tmp_path.rglob("manifest.json"))


def test_no_write_permission(project, tmp_path):
    locked = tmp_path / "locked"
    folder = locked / "sft/train/a/seed0"
    folder.mkdir(parents=True)
    folder.chmod(0o555)
    fails(
        module(project, "posttrain.sft.train", *sft_flags(project, locked)), "is not writable", "change its owner or permissions"
    )
    (tmp_path / "file").write_text("")
    fails(module(project, "posttrain.sft.train", *sft_flags(project, tmp_path / "file")), "cannot be created")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_disk_full(project, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(small)], check=True)
    try:
        done = module(project, "posttrain.sft.train", *sft_flags(project, small))
        fails(done, "cannot write", "No space left on device", "what was finished is kept")
        assert not list(small.rglob("manifest.json"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_time_limit_has_its_own_exit_code(project, tmp_path):
    done = module(project, "posttrain.sft.train", *sft_flags(project, tmp_path, max_minutes="1e-9"))
    fails(done, "at step 1 of 2", "Run the same command again to continue", code=75)


def test_failed_job_keeps_what_is_finished(project):
    """A job that fails names itself in the driver's output; everything before it stays."""
    with project.edited(
        "configs/test/sft.yaml",
        "{weighting: pear_token}",
        "{weighting: pear_token, learning_rate: 1e30, max_grad_norm: 1e30, warmup: 0}",
    ):
        done = project.call("-m", "posttrain.run", "--target", "sft", "--cold")
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "lower learning_rate" in text and "finished jobs are kept" in text
    assert (project.results / "base/scratch/two_style/seed0/manifest.json").exists()
    project.run("--target", "sft", "--cold")
    assert sys.executable and project.planned("sft") == set()
