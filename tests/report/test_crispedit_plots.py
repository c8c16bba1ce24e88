"""CrispEdit's plots: what is there is drawn, what is not there is said, the same results give the same bytes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from posttrain.core import manifest, tables
from posttrain.core.config import JobConfig
from posttrain.report import crispedit
from posttrain.report.artifacts import Artifacts


def results(root, seeds, arms) -> None:
    rng = np.random.default_rng(0)
    for seed in seeds:
        for arm in arms:
            path = root / crispedit.reference(*arm.split("_", 1)) / f"seed{seed}" / manifest.NAME
            path.parent.mkdir(parents=True)
            scores = ("free", "paraphrase", "locality")
            refusals = [b + n for b in ("", "before_") for n in ("refusal", "refusal_paraphrase", "over_refusal")]
            rows = [{"id": str(i), **{s: rng.random() for s in scores}, **{r: float(i % 2) for r in refusals}} for i in range(8)]
            rows[0]["paraphrase"] = None  # an edit without paraphrases
            texts = [{"id": str(i), "source": "markov", "kl": float(rng.random()) * (i > 0)} for i in range(8)]
            files = [tables.write(rows, path.parent / "edits.parquet"), tables.write(texts, path.parent / "drift.parquet")]
            manifest.publish(JobConfig(output=path, seed=seed), {}, files)


def drawn(tmp_path, seeds=(0, 1)) -> dict[str, str]:
    common = {"root": tmp_path / "r", "seeds": seeds, "arms": ("sft",), "tasks": ("t",)}
    crispedit.main(crispedit.Config(output=tmp_path / "crispedit_arms.svg", **common))
    texts = {}
    for plot in crispedit.PLOTS:
        file = tmp_path / f"{plot.__name__}.svg"
        texts[plot.__name__] = " ".join(t.strip() for t in ElementTree.parse(file).getroot().itertext() if t.strip())
    return texts


def test_every_arm_is_named_once(tmp_path):
    arms = [f"world_{name}" for name in crispedit.LABELS]
    results(
        tmp_path / "r", (0, 1), [*arms, "codes_ft", "codes_crisp", "countries_ft", "countries_crisp", "safety_ft", "safety_crisp"]
    )
    texts = drawn(tmp_path)
    for label in crispedit.LABELS.values():
        assert len(re.findall(rf"{re.escape(label)}(?!\d)", texts["crispedit_frontier"])) == 1, label
    assert texts["crispedit_arms"].count("LoRA") == 1 and texts["crispedit_arms"].count("fine-tuning") == 3
    assert "From above: a from-scratch world, a mid-trained model, SmolLM2 (seed 0)." in texts["crispedit_arms"]
    assert "harmless look-alikes" in texts["crispedit_refusals"] and "mean over 2 seeds" in texts["crispedit_frontier"]
    first = {p.name: p.read_bytes() for p in tmp_path.glob("*.svg")}
    drawn(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.svg")} == first


def test_what_is_missing_is_said(tmp_path):
    (tmp_path / "r").mkdir()
    texts = drawn(tmp_path)
    assert "No edit of the from-scratch world was made." in texts["crispedit_frontier"]
    assert (
        "No arm of these plots was run." in texts["crispedit_arms"] and "No refusal was edited in." in texts["crispedit_refusals"]
    )
    results(tmp_path / "r", (0,), ["world_ft", "world_crisp"])
    assert crispedit.arms(
        Artifacts(crispedit.Config(output=tmp_path / "x", root=tmp_path / "r", seeds=(0,), arms=("a",), tasks=("t",))), "world"
    ) == ["ft", "crisp"]
    assert "CrispEdit, γ .9" in drawn(tmp_path, (0,))["crispedit_frontier"]


def test_colours_are_those_of_families():
    assert crispedit.colour("step_50") == crispedit.colour("step_999") != crispedit.colour("crisp")
    assert len({crispedit.colour(arm) for arm in crispedit.LABELS}) == len(crispedit.FAMILIES)


@pytest.mark.parametrize("name", ["step", "a_only_99"])
def test_lines_join_one_family(name):
    (line,) = [names for names in crispedit.LINES.values() if name in names]
    assert len({crispedit.colour(arm) for arm in line}) == 1
