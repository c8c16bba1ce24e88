"""The dashboard on a made-up study: what is drawn, what is named as missing, escaped, self-contained, reproducible."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from test_plots_page import ARMS, TASKS, World

from posttrain.core.errors import UserError
from posttrain.report import dashboard, panels
from posttrain.report.artifacts import Artifacts


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("three"), (0, 1, 2))


def draw(world: World, folder: Path, **changed) -> str:
    folder.mkdir(exist_ok=True)
    options = {**world.options(), **changed}
    dashboard.main(dashboard.Config(output=folder / "dashboard.html", **options))
    return (folder / "dashboard.html").read_text()


@pytest.fixture(scope="module")
def text(world, tmp_path_factory) -> str:
    return draw(world, tmp_path_factory.mktemp("page"))


# --- panels -----------------------------------------------------------------------------------------------------


def test_a_metric_that_nobody_writes_is_named():
    section = panels.Section(
        name="S",
        jobs=("rl/grpo", "sft/train"),
        panels=(
            panels.Panel(title="one", metrics=("loss", "lost")),
            panels.Panel(title="two", metrics=("kl",), only_if="beta is above 0"),
        ),
    )
    assert panels.missing({"rl/grpo": ["loss"], "base/scratch": ["lost"]}, [section]) == ["S: lost"]
    assert panels.missing({"sft/train": ["loss", "lost"]}, [section]) == []


def test_sections_have_names_of_their_own_and_known_jobs():
    from posttrain.study import methods

    assert len({section.name for section in panels.SECTIONS}) == len(panels.SECTIONS)
    for section in panels.SECTIONS:
        assert len({panel.title for panel in section.panels}) == len(section.panels)
        assert all(job.split("/")[1] in methods(job.split("/")[0]) for job in section.jobs)
        assert section.source != "history" or {panel.kind for panel in section.panels} == {"line"}


def test_without_the_package_a_workspace_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match=r"needs the package wandb-workspaces: run `.*pip install wandb-workspaces`"):
        panels.workspace("tiny", "team", "posttrain")


def test_a_workspace_holds_the_panels_that_wandb_has_data_for():
    pytest.importorskip("wandb_workspaces")
    made = panels.workspace("tiny", "team", "posttrain")
    wanted = [section for section in panels.SECTIONS if section.source == "history"]
    assert [section.name for section in made.sections] == [section.name for section in wanted]
    for section, drawn in zip(wanted, made.sections, strict=True):
        assert [panel.title for panel in drawn.panels] == [panel.title for panel in section.panels]
    assert "tiny" in str(made.runset_settings.filters)


# --- page -------------------------------------------------------------------------------------------------------


def test_every_section_and_job_is_there(text):
    for section in panels.SECTIONS:
        assert f">{section.name}</h2>" in text
    for task in TASKS:
        assert f"<h3>SFT, task {task}</h3>" in text and f"<h3>RL, task {task}</h3>" in text
    for name in ("base", "rl_base", *(f"{stage}_{arm}" for stage in ("sft", "rl") for arm in ARMS)):
        assert text.count(f'<span class="name">{name}</span>') == 2 * len(TASKS)  # pass@1 and pass@8 of each task
    assert "not finished" not in text


def test_numbers_are_those_of_the_results(world, text):
    data = Artifacts(dashboard.Config(output=Path("x"), **world.options()))
    for name in ("base", "rl_sft"):
        mean = sum(one.mean() for one in data.passes("near", name)) / 3
        assert f">{mean:.3f}<" in text
    change = sum((data.passes("near", "rl_kl")[i] - data.passes("near", "sft_kl")[i]).mean() for i in range(3)) / 3
    row = re.search(r"<td>rl_kl<span class=\"ci\">from sft_kl</span></td>(.*?)</tr>", text)[1]
    assert f">{change:.3f}<" in row and row.count("<td") == 4


def test_what_was_not_logged_and_what_never_changed_is_said(text):
    assert "kl (logged if beta is above 0)" in text and "completions/mean_length" in text
    assert "The same in every job, step and seed: loss 1." in text


def test_bands_over_seeds_and_none_with_one(world, text, tmp_path):
    assert "<polygon" in text and "bands the range over seeds" in text
    one = draw(world, tmp_path, seeds=(1,))
    assert "<polyline" in one and "<polygon" not in one and "bands" not in one and "Seed 1." in one


def test_page_is_escaped_and_loads_nothing(world, tmp_path):
    other = World(tmp_path / "<b>&", (0,))
    text = draw(other, tmp_path / "page", root=other.root.rename(other.root.with_name("<script>x")))
    assert "&lt;script&gt;x" in text and "<script" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text) and "http" not in text and "@import" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and {i[1:] for i in re.findall(r'href="(#[^"]+)"', text)} == set(ids)


def test_a_study_that_still_runs_is_drawn_and_what_is_missing_named(tmp_path):
    world = World(tmp_path / "w", (0, 1))
    for reference in ("rl/grpo/near-sft", "evaluate/reasoning/near-sft_sft"):
        (world.root / reference / "seed1" / "manifest.json").unlink()
    text = draw(world, tmp_path / "page")
    assert "<b>2 jobs are not finished</b>" in text and "rl/grpo/near-sft, evaluate/reasoning/near-sft_sft" in text
    assert re.search(r"<td>rl_sft<span class=\"ci\">from sft_sft</span></td><td class=\"number\">–</td>", text)
    nothing = draw(world, tmp_path / "empty", root=tmp_path / "none")
    assert nothing.count("No job has finished yet.") == len(panels.SECTIONS)


def test_second_run_is_byte_identical(world, text, tmp_path):
    assert draw(world, tmp_path) == text


# --- parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.24, 0.9), (-3, 7), (1e-7, 5e-4), (5, 5), (0, 0), (-2e5, 3e5), (0.999, 1.0)])
def test_an_axis_spans_its_values_with_few_round_marks(low, high):
    marks = dashboard.axis(low, high)
    span = marks[-1] - marks[0]
    assert 3 <= len(marks) <= 6 and marks[0] <= low + 1e-9 * span and high - 1e-9 * span <= marks[-1]


def test_long_series_are_averaged_and_short_ones_kept():
    steps, values = dashboard.thin([1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 2.0, 4.0, 6.0, 9.0], points=3)
    assert (steps, values) == ([1.5, 3.5, 5.0], [1.0, 5.0, 9.0])
    assert dashboard.thin([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_parents():
    assert [dashboard.parent(name) for name in ("base", "sft_kl", "rl_kl", "rl_base")] == [None, "base", "sft_kl", "base"]


def test_regressions_come_first():
    def row(estimate, side):
        return {"changes": {"pass@1": [{"estimate": estimate, "class": side}, None]}}

    rows = sorted([row(0.2, "better"), row(-0.3, ""), row(-0.1, "worse")], key=dashboard.order)
    assert [one["changes"]["pass@1"][0]["estimate"] for one in rows] == [-0.1, -0.3, 0.2]


def test_gpu_hours_count_cards_of_jobs_that_ran_on_cards(tmp_path):
    world = World(tmp_path, (0,))
    path = world.root / "rl/grpo/far-kl/seed0/manifest.json"
    told = json.loads(path.read_text()) | {"device": "Some card"}
    path.write_text(json.dumps(told))
    data = Artifacts(dashboard.Config(output=Path("x"), **world.options()))
    rows = {row["name"]: row for row in dashboard.cost(data, {"rl/grpo": 1440, "sft/train": 1440})}
    assert rows["rl/grpo"]["gpu"] == "1.000" and rows["sft/train"]["gpu"] == "0.000"  # 2.5 s on 1440 cards
    assert rows["total"]["gpu"] == "1.000" and int(rows["total"]["jobs"]) > int(rows["rl/grpo"]["jobs"])
