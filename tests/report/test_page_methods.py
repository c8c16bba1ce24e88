"""The page with methods of their own: groups of claims, shading, intervals that are missing, sections, what is escaped."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest
import yaml

from posttrain.core.manifest import Metric
from posttrain.report import claims, drawing, page
from posttrain.report.sections import SECTIONS
from tests.results import publish

STATED = {"statement": "s", "paper_value": "p", "source": "q", "scope": "z"}
LINEAGE, D3 = "evaluate/lineage/prism", "midtrain/d3/chain_d3"
ROWS = {"kind": "rows", "reference": D3, "file": "replicates.parquet", "metric": "steps"}
CLAIMS = {
    "prism": {
        "low": {"kind": "scalar", "reference": LINEAGE, "metric": "cosine", "bound": 0.8, "side": "at_most"},
        "high": {"kind": "scalar", "reference": LINEAGE, "metric": "cosine", "bound": 0.1, "side": "at_least"},
        "control": {"kind": "scalar", "reference": LINEAGE, "metric": "cosine", "bound": 0.1, "control": True},
        "gain": {"kind": "difference", "task": "prism", "arm": "mcs", "baseline": "prism_base", "smallest_effect": 0.1},
        "small": {"kind": "at_most", "task": "prism", "arm": "mcs", "baseline": "prism_base", "bound": 0.2},
        "either": {"kind": "at_most", "task": "prism", "arm": "mcs", "baseline": "prism_base", "bound": 0.2, "two_sided": True},
    },
    "d3": {
        "fast": {**ROWS, "arm": "steps", "side": "at_most", "bound": 40},
        "slow": {**ROWS, "arm": "steps", "bound": 10, "statement": "<b>bold</b> & <script>x</script>", "source": "<i>q</i>"},
        "other": {**ROWS, "arm": "steps", "bound": 10, "metric": "steps <of> a run"},
        "gone": {"kind": "rows", "reference": "midtrain/d3/chain_x", "file": "f", "arm": "a", "metric": "steps", "bound": 1},
    },
    "pear": {"big": {"kind": "not_testable", "scope": "needs a cluster"}},
}
MEASURED = (
    "evaluate/reasoning/prism-prism_base",
    "evaluate/reasoning/prism-mcs",
    "evaluate/retention/prism-mcs",
    "evaluate/reasoning/words-smollm2",
    "evaluate/reasoning/words-hub_model",
    LINEAGE,
    D3,
)


def study(folder: Path, seeds: tuple[int, ...]) -> Path:
    root = folder / "results/tiny"
    (folder / "claims.yaml").write_text(
        yaml.safe_dump({m: {n: STATED | c for n, c in f.items()} for m, f in CLAIMS.items()}, sort_keys=False)
    )
    packaged = publish(root, "base/packaged/smollm2", 0, metrics={"parameters": 1234.0}, card={"licence": "<Apache>"})
    hub = publish(root, "base/hub/far", 0, card={"repo": "org/far"})
    for seed in seeds:
        scratch = publish(root, "base/scratch/prism", seed)
        mcs = publish(root, "midtrain/prism/mcs", seed, inputs={"start": scratch})
        for name, right, model in (("prism_base", 1, scratch), ("mcs", 5, mcs)):
            rows = [
                {"id": str(i), "family": "math", "n": 8, "correct": right + i % 2 + seed, "correct_ungated": 8} for i in range(6)
            ]
            metrics = {"pass@1": (right + 0.5) / 8, "pass@8": 0.123456, "ungated": 0.875}
            publish(root, f"evaluate/reasoning/prism-{name}", seed, {"items.parquet": rows}, metrics, inputs={"model": model})
        publish(root, "evaluate/retention/prism-mcs", seed, metrics={"loss": 2.125 + seed}, inputs={"model": mcs})
        metrics = {"cosine": 0.25 + 0.01 * seed, "l2/base>mid": 3.0}
        publish(root, LINEAGE, seed, metrics=metrics, inputs={"models.base": scratch, "models.mid": mcs})
        steps = [{"replicate": r, "steps": 20.0 + r + seed} for r in range(4)]
        publish(root, D3, seed, {"replicates.parquet": steps})
        sample = {"id": "0", "prompt": "<p>", "answer": "a", "first_response": "<script>1</script>", "n": 1, "correct": 0}
        for name, model in (("smollm2", packaged), ("hub_model", hub)):
            metrics = {"pass@1": Metric(value=0.5, n=4, se=0.25)}
            files = {"items.parquet": [sample]}
            publish(root, f"evaluate/reasoning/words-{name}", seed, files, metrics, inputs={"model": model})
    job = claims.Config(
        output=root / "claims.csv", root=root, seeds=seeds, arms=("sft",), claims=folder / "claims.yaml", resamples=200
    )
    claims.main(job)
    report = root / "report"
    report.mkdir()
    for plot in page.PLOTS:
        (report / f"{plot}.svg").write_text(drawing.stacked({}, plot))
    with matplotlib.rc_context(drawing.STYLE):  # text stays text
        for method, plots in SECTIONS.items():
            for plot in plots:
                figures = {method: drawing.note("x", f"drawing of {plot}")}
                (report / f"{plot}.svg").write_text(drawing.stacked(figures, plot))
    return root


def text_of(root: Path, seeds, **options) -> str:
    values = {"measured": MEASURED, "methods": ("prism", "d3"), **options}
    job = page.Config(
        output=root / "report/index.html",
        root=root,
        seeds=seeds,
        arms=("sft",),
        tasks=(),
        claims=root.parents[1] / "claims.yaml",
        **values,
    )
    page.main(job)
    return job.output.read_text()


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return study(tmp_path_factory.mktemp("one"), (0,))


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    return study(tmp_path_factory.mktemp("three"), (0, 1, 2))


@pytest.fixture(scope="module")
def shown(three) -> str:
    return text_of(three, (0, 1, 2))


def row(text: str, name: str) -> str:
    (found,) = [part for part in re.findall(r"<tr>.*?</tr>", text, flags=re.S) if f"<code>{name}</code>" in part]
    return found


def shapes(text: str, name: str) -> dict[str, float]:
    """Places of the inline plot: shading from .. to, interval low .. high, estimate."""
    part = row(text, name)
    shade = re.search(r'<rect x="([-\d.]+)" y="0" width="([-\d.]+)"', part)
    ends = re.search(r'x1="([-\d.]+)" x2="([-\d.]+)" y1="10" y2="10"', part)
    left, width = map(float, shade.groups())
    return {
        "from": left,
        "to": left + width,
        "low": float(ends[1]),
        "high": float(ends[2]),
        "estimate": float(re.search(r'<circle cx="([-\d.]+)"', part)[1]),
    }


def section(text: str, anchor: str) -> str:
    return re.search(rf'<section>\s*<h2 id="{anchor}">.*?</section>', text, flags=re.S)[0]


# --- groups and shading -----------------------------------------------------------------------------------------


def test_claims_stand_in_groups_by_method_kind_metric_and_control(shown):
    titles = re.findall(r'<tr class="head"><th colspan="3">(.*?)</th>', shown)
    assert titles == [
        "PRISM: cosine",
        "PRISM: Controls, not claims of the paper: cosine",
        "PRISM: Difference in pass@1 between two arms",
        "PRISM: Difference in pass@1 between two arms that should be small",
        "D³: steps",
        "D³: steps &lt;of&gt; a run",
        "PEAR: Not testable in this tier",
    ]
    for method, found in CLAIMS.items():
        for name in found:
            assert row(shown, f"{method}.{name}")
    assert "Of 10 claims (controls not counted)" in shown


def test_the_side_that_counts_is_shaded(shown):
    """At most: from the left edge to the bound; at least, and gains: from it to the right edge; either way: around zero."""
    places = {name: shapes(shown, name) for name in ("prism.low", "prism.high", "prism.gain", "prism.small", "prism.either")}
    places |= {name: shapes(shown, name) for name in ("d3.fast", "d3.slow")}
    for name in ("prism.low", "prism.small", "d3.fast"):
        assert places[name]["from"] == 0 and places[name]["to"] < page.FOREST, name
    for name in ("prism.high", "prism.gain", "d3.slow"):
        assert places[name]["to"] == page.FOREST and places[name]["from"] > 0, name
    assert places["prism.high"]["from"] < places["prism.high"]["low"] < places["prism.low"]["to"]  # 0.1 < 0.26 < 0.8
    assert places["d3.slow"]["from"] < places["d3.slow"]["low"] < places["d3.fast"]["to"]  # 10 < 22.5 < 40
    either, small = places["prism.either"], places["prism.small"]
    reference = float(re.search(r'x1="([\d.]+)" x2="\1" y1="0" y2="20"', row(shown, "prism.either"))[1])
    assert 0 < either["from"] < reference < either["to"] == pytest.approx(small["to"])
    assert reference - either["from"] == pytest.approx(either["to"] - reference, abs=0.2)
    assert either["estimate"] > either["to"]  # contradicted: 0.5 against 0.2


def test_every_mark_lies_inside_its_plot(shown):
    for method, found in CLAIMS.items():
        for name in found:
            if "<circle" in row(shown, f"{method}.{name}"):
                assert all(0 <= x <= page.FOREST for x in shapes(shown, f"{method}.{name}").values())


def test_a_single_number_without_interval_is_drawn_as_a_dot(one, shown):
    text = text_of(one, (0,))
    place = shapes(text, "prism.low")
    assert place["low"] == place["high"] == place["estimate"]
    assert 'aria-label="0.250, no interval"' in row(text, "prism.low") and "None" not in text
    assert "one seed has no interval" in row(text, "prism.low") and "One seed: intervals are over items only" in text
    wide = shapes(shown, "prism.low")
    assert wide["low"] < wide["estimate"] < wide["high"] and 'aria-label="0.260, interval [' in row(shown, "prism.low")


def test_what_was_not_run_has_neither_number_nor_plot(shown):
    for name in ("d3.gone", "pear.big"):
        assert "<svg" not in row(shown, name) and "not testable here</span>" in row(shown, name) and "–</td>" in row(shown, name)


# --- sections ---------------------------------------------------------------------------------------------------


def test_each_method_has_a_section_with_its_plots(shown):
    for method, name in (("prism", "PRISM"), ("d3", "D³")):
        part = section(shown, f"method-{method}")
        assert f">{name}</h2>" in part and f'<a href="#method-{method}">{name}</a>' in shown
        assert re.findall(r"<figcaption>(.*?)</figcaption>", part) == list(SECTIONS[method].values())
        for plot in SECTIONS[method]:
            assert f'id="{plot}-{method}"' in part and f"drawing of {plot}" in part
    assert "PRISM" not in section(shown, "method-d3") and "Checkpoint" not in section(shown, "method-d3")


def test_checkpoints_of_a_method_stand_in_one_table(shown):
    """One row per evaluated checkpoint, means over seeds; the analysis of a lineage is no checkpoint."""
    part = section(shown, "method-prism")
    assert re.findall(r"<tr><td><code>(.*?)</code></td>", part) == ["prism_base", "mcs"]
    columns = re.findall(r'<th class="number">(.*?)</th>', part)
    assert columns == ["pass@1", "ungated", "loss"] and "0.123" not in part
    assert re.findall(r'<td class="number">(.*?)</td>', part) == ["0.188", "0.875", "–", "0.688", "0.875", "3.125"]


def test_only_models_of_others_are_listed_as_they_come(shown):
    part = shown[shown.index('<h2 id="pretrained">') : shown.index('<h2 id="data">')]
    assert re.findall(r"<h3>(.*?)</h3>", part) == ["reasoning/words-hub_model", "reasoning/words-smollm2"]
    assert "1,234" in part and "org/far" in part and "base/packaged/smollm2/seed0" in part
    assert "prism-mcs" not in part and "lineage" not in part


def test_text_of_claims_models_and_samples_is_escaped(shown):
    assert (
        "&lt;b&gt;bold&lt;/b&gt; &amp; &lt;script&gt;" in shown and "&lt;i&gt;q&lt;/i&gt;" in shown and "&lt;Apache&gt;" in shown
    )
    assert "<script" not in shown and "<b>bold" not in shown and "<i>q" not in shown and "<p>," not in shown
    ids = re.findall(r'\bid="([^"]+)"', shown)
    assert len(ids) == len(set(ids)) and {i[1:] for i in re.findall(r'href="(#[^"]+)"', shown)} <= set(ids)


def test_a_tier_without_methods_has_no_sections(three):
    text = text_of(three, (0, 1, 2), methods=(), measured=())
    assert "method-prism" not in text and "method-d3" not in text and "drawing of" not in text
    assert "PRISM: cosine" in text  # the ledger is the study's


def test_jobs_are_counted_from_what_was_measured(shown, three):
    jobs = len(list(three.glob("*/*/*/seed*/manifest.json")))
    assert f"{jobs} jobs with seeds 0, 1, 2" in re.sub(r"\s+", " ", shown)
    fewer = re.search(r"(\d+) jobs with", text_of(three, (0, 1, 2), measured=()))
    assert int(fewer[1]) == 8  # the pretrained models and their evaluations alone
