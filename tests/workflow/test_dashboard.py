"""The dashboard of a real study: its metrics are those that trainers log, its rule stands outside of `all`."""

from __future__ import annotations

import inspect
import json
import re

from posttrain.core import manifest
from posttrain.core.tracking import read_history
from posttrain.report import panels


def written(project, source: str) -> dict[str, set[str]]:
    """stage/method -> names that its jobs wrote into one kind of file."""
    found: dict[str, set[str]] = {}
    for path in project.results.glob("*/*/*/seed*/manifest.json"):
        kind = "/".join(path.parts[-5:-3])
        if source == "manifest":
            names = set(manifest.read(path, verify=False).metrics)
        elif source == "provenance":
            names = set(json.loads((path.parent / "provenance.json").read_text()))
        else:
            history = path.parent / "history.jsonl"
            names = {name for row in read_history(history) for name in row} if history.is_file() else set()
        found[kind] = found.get(kind, set()) | names
    return found


def test_every_metric_of_every_panel_is_written(project):
    for section in panels.SECTIONS:
        assert panels.missing(written(project, section.source), [section]) == []


def test_the_conditional_metric_is_trls():
    from trl import GRPOTrainer

    conditional = {name for section in panels.SECTIONS for panel in section.panels if panel.only_if for name in panel.metrics}
    assert conditional == {"kl", "held_out/prose", "fact_recall"}  # the others: tests/workflow/test_midtrain.py
    assert re.search(r'\["kl"\]\.append', inspect.getsource(GRPOTrainer))


def test_its_rule_draws_it_and_is_not_part_of_all(project):
    assert project.planned("all") == set() and not (project.results / "report/dashboard.html").exists()
    done = project.snakemake("dashboard")
    assert done.returncode == 0, done.stderr[-2000:]
    page = (project.results / "report/dashboard.html").read_bytes()
    assert b"Dashboard, test tier" in page and project.planned("dashboard") == set()
    done = project.call("-m", "posttrain.dashboard", "--tier", "test")
    assert done.returncode == 0 and "results/test/report/dashboard.html" in done.stdout, done.stderr
    assert (project.results / "report/dashboard.html").read_bytes() == page
    (project.results / "report/dashboard.html").unlink()


def test_a_workspace_that_cannot_be_made_is_one_sentence(project):
    done = project.call("-m", "posttrain.dashboard", "--tier", "test", "--wandb")
    assert done.returncode == 2 and done.stderr.startswith("error: wandb.entity of configs/config.yaml is null")
    done = project.call("-m", "posttrain.dashboard", "--tier", "test", "--seeds", "a")
    assert done.returncode == 2 and "whole numbers" in done.stderr
    (project.results / "report/dashboard.html").unlink()
