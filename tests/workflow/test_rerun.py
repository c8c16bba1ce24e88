"""What reruns after an edit: exactly what depends on the change. Every row is an edit and the jobs of a dry run."""

from __future__ import annotations

import json
import subprocess

import pytest

TASK, TOKENIZER, MIX, BASE, TRACES = (
    "Generate verifiable items: two_style (seed 0)",
    "Build tokenizer: style",
    "Tokenise mix: two_style (seed 0)",
    "Train two_style from scratch (seed 0)",
    "Store traces with behaviour log-probabilities: two_style (seed 0)",
)
OVERHEAD = "Time PEAR weights against SFT on two_style (seed 0)"
SFT = {arm: f"SFT {arm} on two_style (seed 0)" for arm in ("sft", "pear_token")}
RL = {start: f"GRPO on two_style from {start} (seed 0)" for start in ("base", "sft", "pear_token")}
NAMES = ("base", "sft_sft", "sft_pear_token", "rl_base", "rl_sft", "rl_pear_token")
EVALUATE = {name: f"Evaluate {name} on two_style (seed 0)" for name in NAMES}
REPORT = {"Write the claims ledger", "Draw RL curves, rank reversal, weights and retention", "Write the report page"}
ARM = {arm: {SFT[arm], RL[arm], EVALUATE[f"sft_{arm}"], EVALUATE[f"rl_{arm}"]} for arm in ("sft", "pear_token")}
ALL_SFT = ARM["sft"] | ARM["pear_token"] | REPORT
FROM_RL = {*RL.values(), *(EVALUATE[n] for n in NAMES if n.startswith("rl_"))} | REPORT
EVERYTHING = {TASK, TOKENIZER, MIX, BASE, TRACES, OVERHEAD, *SFT.values(), *RL.values(), *EVALUATE.values()} | REPORT

EDITS = {
    "comment in a YAML": ("configs/test/sft.yaml", "train:\n", "# a comment\ntrain: # another\n", set()),
    "key order in a YAML": ("configs/test/sft.yaml", "{steps: 12, batch_size: 16,", "{batch_size: 16, steps: 12,", set()),
    "a number written otherwise": ("configs/test/rl.yaml", "learning_rate: 0.001", "learning_rate: 1e-3", set()),
    "a default written out": ("configs/test/sft.yaml", "{weighting: pear_token}", "{weighting: pear_token, gamma: 0.999}", set()),
    "a PEAR-only key": (
        "configs/test/sft.yaml",
        "{weighting: pear_token}",
        "{weighting: pear_token, gamma: 0.9}",
        ARM["pear_token"] | REPORT,
    ),
    "a shared SFT key": ("configs/test/sft.yaml", "{steps: 12,", "{steps: 13,", ALL_SFT),
    "an RL key": ("configs/test/rl.yaml", "learning_rate: 0.001", "learning_rate: 0.002", FROM_RL),
    "an evaluation key": ("configs/test/evaluate.yaml", "samples: 8", "samples: 9", set(EVALUATE.values()) | REPORT),
    "a data key": ("configs/test/data.yaml", "train: 256", "train: 260", EVERYTHING - {TOKENIZER}),
    "runtime-only keys": ("configs/test/sft.yaml", "checkpoint_every: 4", "checkpoint_every: 6, log_every: 2, workers: 1", set()),
    "resources": ("configs/test/sft.yaml", "train:\n", "train:\n  resources: {mem_gb: 7, hours: 3}\n", set()),
    "W&B settings": ("configs/config.yaml", "mode: disabled", "mode: offline", set()),
    "losses.py": (
        "src/posttrain/sft/losses.py",
        "(1.0 - p.sum(-1)).clamp(min=0.0)",
        "(1.0 - p.sum(-1)).clamp(min=1e-12)",
        ALL_SFT | {OVERHEAD},
    ),
    "a comment and a docstring in losses.py": ("src/posttrain/sft/losses.py", '"""SFT losses', '# why\n"""All SFT losses', set()),
    "a core module that only trainers use": (
        "src/posttrain/core/training.py",
        '"save_total_limit": 2',
        '"save_total_limit": 3',
        EVERYTHING - {TASK, TOKENIZER, MIX},
    ),
    "a core module that all jobs use": (
        "src/posttrain/core/manifest.py",
        "MAX_BYTES = 1_000_000",
        "MAX_BYTES = 1_000_001",
        EVERYTHING,
    ),
    "the report's code": (
        "src/posttrain/report/ledger.py",
        "if high < smallest:",
        "if high <= smallest:",
        REPORT - {"Draw RL curves, rank reversal, weights and retention"},
    ),
    "a claim": (
        "configs/claims.yaml",
        "smallest_effect: 0.05",
        "smallest_effect: 0.06",
        REPORT - {"Draw RL curves, rank reversal, weights and retention"},
    ),
}


def test_nothing_changed(project):
    assert project.planned() == set()
    assert "Nothing to do" in project.run()


@pytest.mark.parametrize("name", EDITS)
def test_edit(project, name):
    path, old, new, expected = EDITS[name]
    with project.edited(path, old, new):
        assert project.planned() == expected
    assert project.planned() == set() if name == "losses.py" else True


def test_the_content_of_a_deepspeed_file_counts(project):
    """Its name alone would hide an edit: the settings that trigger a rerun hold what the file says."""
    from posttrain.study import Study

    def settings() -> str:
        return Study({"tier": "test"}, folder=project.folder / "configs").settings_text("sft", "train", ("two_style", "sft"))

    with project.edited("configs/test/sft.yaml", "{steps: 12,", "{deepspeed: zero2, steps: 12,"):
        before = settings()
        with project.edited("configs/deepspeed/zero2.json", '"stage": 2', '"stage": 1'):
            assert settings() != before
        assert settings() == before


def test_a_git_commit_reruns_nothing(project):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=project.folder, check=True, capture_output=True
        )

    if not (project.folder / ".git").exists():
        git("init")
        git("add", "-A")
    git("commit", "--allow-empty", "-m", "nothing")
    assert project.planned() == set()


def test_a_seed_added_runs_that_seed_and_the_report(project):
    planned = project.planned("--config", "seeds=[0,1]")
    seeded = EVERYTHING - REPORT - {TOKENIZER}
    assert planned == {message.replace("seed 0", "seed 1") for message in seeded} | REPORT


def test_an_intermediate_deleted_runs_only_what_needs_it(project):
    path = project.results / "sft" / "traces" / "two_style" / "seed0" / "manifest.json"
    text = path.read_bytes()
    path.unlink()
    try:
        assert project.planned() == set()  # its consumers are finished; nobody asks for it
        assert TRACES in project.planned(str(path.relative_to(project.folder)))
    finally:
        path.write_bytes(text)
        project.snakemake("--touch")


def test_targets_by_name(project):
    forced = project.planned("--forceall", "sft")
    assert forced == {TASK, TOKENIZER, MIX, BASE, TRACES, *SFT.values()}
    ends = {"Write the claims ledger", "Draw RL curves, rank reversal, weights and retention", "Write the report page"}
    found = project.planned("--forceall", "pear")
    assert found == (EVERYTHING - ends) | {"Write the ledger of pear alone"}
    one = "results/test/sft/train/two_style-pear_token/seed0/manifest.json"
    assert project.planned("--force", one) == {SFT["pear_token"]}


def test_targeted_retrain_with_identical_result_stops_there(project):
    target = "results/test/sft/train/two_style-pear_token/seed0/manifest.json"
    before = (project.folder / target).read_bytes()
    done = project.snakemake("--force", target)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (project.folder / target).read_bytes() == before
    assert project.planned() == set()


def test_targeted_retrain_with_another_result_goes_on(project):
    target = "results/test/sft/train/two_style-pear_token/seed0/manifest.json"
    with project.edited("configs/test/sft.yaml", "{weighting: pear_token}", "{weighting: pear_token, gamma: 0.5}"):
        done = project.snakemake(target)
        assert done.returncode == 0, done.stderr[-2000:]
        assert project.planned() == ARM["pear_token"] - {SFT["pear_token"]} | REPORT
    assert project.snakemake(target).returncode == 0  # back to the old result
    assert project.planned() == set()


def test_every_manifest_is_whole_and_equals_the_rule_graph(project):
    """Each manifest passes verification, and its inputs are those that the DAG names."""
    from posttrain.core import manifest

    files = sorted(project.results.rglob("manifest.json"))
    assert len(files) == len(EVERYTHING) - len(REPORT)
    digests = {manifest.sha256(path): path for path in files}
    for path in files:
        found = manifest.read(path)
        assert path.parent.relative_to(project.results) == __import__("pathlib").Path(found.identity)
        assert all(digest in digests for digest in found.inputs.values())
    rl = json.loads((project.results / "rl/grpo/two_style-pear_token/seed0/manifest.json").read_text())
    assert digests[rl["inputs"]["start"]].parts[-3] == "two_style-pear_token"
