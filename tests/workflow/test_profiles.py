"""Every tier and profile resolves, the advertised commands work, lint and formatting hold, the report builds."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from posttrain.study import Study

ROOT = Path(__file__).parents[2]
TIERS = sorted(p.name for p in (ROOT / "configs").iterdir() if (p / "data.yaml").exists())


def tool(name: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(Path(sys.executable).parent / name), *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("profile", [(), ("--profile", "slurm")])
def test_dry_run_of_every_tier_and_profile(fresh, tier, profile):
    cores = () if profile else ("--cores", "2")
    done = fresh.call("-m", "snakemake", *profile, *cores, "-n", "all", "--config", f"tier={tier}")
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-2000:]
    assert re.search(r"^rl_grpo +\d+$", text, re.M)


def test_tiers_are_the_three_of_the_design():
    assert set(TIERS) == {"tiny", "small", "paper"}


def test_default_profile_holds_portable_keys_only():
    keys = yaml.safe_load((ROOT / "profiles/default/profile.yaml").read_text())
    assert not keys.keys() & {"executor", "jobs", "cores", "resources", "default-resources", "set-resources", "retries"}


def test_slurm_profile_does_not_clamp_threads_and_explains_every_key():
    text = (ROOT / "profiles/slurm/profile.yaml").read_text()
    keys = yaml.safe_load(text)
    assert "cores" not in keys and keys["executor"] == "slurm"
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if re.match(r"^[a-z]", line):
            assert "#" in line or lines[i - 1].lstrip().startswith("#"), f"no reason given for: {line}"


@pytest.mark.parametrize("tier", TIERS)
def test_every_rule_with_gpus_has_a_line_for_its_partition(tier, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = yaml.safe_load((ROOT / "profiles/slurm/profile.yaml").read_text())["set-resources"]
    assert {name.replace("/", "_") for name in Study({"tier": tier}).cards()} <= set(lines)


def test_rules_log_and_explain_themselves():
    """Every rule with a command has log, benchmark, threads, message; none retries inside its allocation."""
    for file in sorted((ROOT / "workflow/rules").glob("*.smk")):
        text = file.read_text()
        for name, body in re.findall(r"^rule (\w+):\n((?:[ \t]+.*\n|\n)*)", text, re.M):
            assert "message:" in body, name
            assert "retries:" not in body and "touch(" not in body, name
            if "shell:" in body:
                assert all(f"{directive}:" in body for directive in ("log", "benchmark", "threads", "resources")), name


def test_lint_and_format():
    for words in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("snakefmt", "--check", "Snakefile", "workflow")):
        done = tool(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    lint = tool("snakemake", "--lint")
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_schemas_and_readme_are_up_to_date():
    for module in ("posttrain.schema", "posttrain.docs"):
        done = subprocess.run([sys.executable, "-m", module, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_snakemake_report_of_a_finished_study(project):
    done = project.snakemake("all", "--report", "report.zip")
    assert done.returncode == 0, done.stdout + done.stderr
    names = zipfile.ZipFile(project.folder / "report.zip").namelist()
    assert any("claims" in name for name in names) and any("index" in name for name in names)


def test_two_clones_give_identical_manifests(project, fresh):
    """The same study in another folder: every manifest and the ledger have the same bytes, apart from measured times."""
    fresh.run()
    ours = {p.relative_to(project.results): p for p in project.results.rglob("manifest.json")}
    theirs = {p.relative_to(fresh.results): p for p in fresh.results.rglob("manifest.json")}
    assert ours.keys() == theirs.keys()
    differing = {str(name) for name in ours if ours[name].read_bytes() != theirs[name].read_bytes()}
    timed = {"sft/overhead/two_style/seed0/manifest.json"}
    assert differing <= timed
    import json

    assert "times" in json.loads(ours[Path(next(iter(timed)))].read_text())["not_deterministic"]


def test_run_prints_the_ledger_and_where_the_report_is(project):
    assert "verdict" in project.output and "Report: results/test/report/index.html" in project.output
    assert re.search(r"^\[\d+/\d+\] \d+:\d\d elapsed, about \d+:\d\d left \| ", project.output, re.M)


def test_jobs_run_with_the_drivers_python_though_its_environment_is_not_active(fresh):
    done = fresh.snakemake("results/test/data/tokenizer/style/seed0/manifest.json", PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (fresh.folder / "results/test/data/tokenizer/style/seed0/manifest.json").is_file()
