"""Plots and page of a finished study: valid, self-contained, escaped, reproducible."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from posttrain.core import manifest, tables

PLOTS = ("rl_curves", "before_after", "rank_reversal", "weights", "retention")
FLAGS = ["--seeds", "[0]", "--arms", '["sft","pear_token"]', "--tasks", '["two_style"]']


@pytest.fixture(scope="module")
def page(project) -> str:
    return (project.results / "report/index.html").read_text()


def test_plots_are_xml_and_name_every_arm(project):
    for name in PLOTS:
        path = project.results / "report" / f"{name}.svg"
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    for name in ("rl_curves", "before_after", "rank_reversal"):
        text = (project.results / "report" / f"{name}.svg").read_text()
        assert "pear_token" in text and "two_style" in text
    assert "No retention evaluation on this task" in (project.results / "report/retention.svg").read_text()


def test_page_shows_the_ledger_and_loads_nothing(project, page):
    import csv

    with open(project.results / "claims.csv") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        assert row["claim"] in page
    assert page.count('class="badge') == len(rows)
    assert not re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page)
    assert not re.findall(r"url\((?!#)", page) and "<script" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_numbers_of_the_page_are_those_of_the_manifests(project, page):
    for checkpoint in ("base", "sft_sft", "rl_pear_token"):
        found = manifest.read(project.results / f"evaluate/reasoning/two_style-{checkpoint}/seed0/manifest.json")
        assert f"{found.metrics['pass@1'].value:.3f}" in page
    nll = manifest.read(project.results / "sft/train/two_style-sft/seed0/manifest.json").metrics["validation/nll_per_trace"].value
    assert f"{nll:.3f}" in page


def test_rollouts_are_escaped_and_output_is_reproducible(project, tmp_path):
    root = tmp_path / "results" / "test"
    shutil.copytree(project.results, root)
    where: Path = root / "rl/grpo/two_style-base/seed0"
    rows = tables.read(where / "rollouts.parquet")
    rows[0]["completion"] = "<script>alert(1)</script>"
    file = tables.write(rows, where / "rollouts.parquet")
    recorded = json.loads((where / "manifest.json").read_text())
    recorded["artifacts"]["rollouts.parquet"] = {"sha256": manifest.sha256(file), "size": file.stat().st_size}
    (where / "manifest.json").write_text(json.dumps(recorded))
    texts = []
    for _ in range(2):
        for module, name in (("plots", "rl_curves.svg"), ("page", "index.html")):
            done = project.call(
                "-m", f"posttrain.report.{module}", "--root", str(root), *FLAGS, "--output", str(root / "report" / name)
            )
            assert done.returncode == 0, done.stderr[-2000:]
        texts.append([(root / "report" / name).read_bytes() for name in (*(f"{p}.svg" for p in PLOTS), "index.html")])
    assert texts[0] == texts[1]
    page = texts[0][-1].decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script" not in page


def test_a_changed_file_is_named(project, tmp_path):
    root = tmp_path / "results" / "test"
    shutil.copytree(project.results, root)
    history = root / "rl/grpo/two_style-sft/seed0/history.jsonl"
    history.write_text(history.read_text() + '{"step": 99, "reward": 1}\n')
    done = project.call(
        "-m", "posttrain.report.plots", "--root", str(root), *FLAGS, "--output", str(root / "report/rl_curves.svg")
    )
    assert done.returncode == 2 and "history.jsonl differs from what" in done.stderr
