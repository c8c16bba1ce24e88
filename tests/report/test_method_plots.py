"""PRISM's and D3's plots on made-up results: what is drawn is what the tables say, for one seed and for three."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from posttrain.core.effects import main_effects
from posttrain.core.errors import UserError
from posttrain.core.stats import bootstrap
from posttrain.evaluate.lineage import points
from posttrain.report import d3, prism
from posttrain.report.artifacts import COLOURS, MUTED, Artifacts
from posttrain.report.sections import SECTIONS
from tests.results import publish

SEEDS = (0, 1, 2)
FAMILIES = ("math", "code", "science")
PAIRS = ("base>mid", "mid>rl", "base>rl")


def data(root: Path, seeds=SEEDS) -> Artifacts:
    return Artifacts(prism.Config(output=root / "report/x.svg", root=root, seeds=seeds, arms=("sft",), tasks=("t",)))


def write(module, root: Path, folder: Path, seeds=SEEDS) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    module.main(module.Config(output=folder / "one.svg", root=root, seeds=seeds, arms=("sft",), tasks=("t",)))
    return {path.stem: path.read_bytes() for path in folder.iterdir()}


def texts(source) -> list[str]:
    """Texts of a figure, in order of drawing; or of a written file."""
    if isinstance(source, bytes):
        return ["".join(e.itertext()) for e in ElementTree.fromstring(source).iter("{http://www.w3.org/2000/svg}text")]
    import matplotlib.text

    return [found.get_text() for found in source.findobj(matplotlib.text.Text) if found.get_text()]


def line(axes, colour: str, marker: str = "None", style: str | None = None) -> tuple[list[float], list[float]]:
    """The one line of this look: (x, y)."""
    (found,) = [
        one
        for one in axes.lines
        if one.get_color() == colour and one.get_marker() == marker and (style is None or one.get_linestyle() == style)
    ]
    return list(found.get_xdata()), list(found.get_ydata())


# --- PRISM ------------------------------------------------------------------------------------------------------


def write_prism(root: Path, seed: int) -> None:
    for k, mix in enumerate(prism.MIDS):
        history = [{"step": step, "loss": 1.0} for step in (50, 150)] + [
            {
                "step": step,
                "held_out/prose": 2.0 - 0.001 * step + 0.1 * k + 0.01 * seed,
                "fact_recall": 0.2 + 0.1 * k + 0.001 * step,
            }
            for step in (100, 200)
        ]
        metrics = {"before/held_out/prose": 2.0 + 0.01 * seed, "before/fact_recall": 0.125, "held_out/prose": 1.0}
        publish(root, f"midtrain/prism/{mix}", seed, {"history.jsonl": history}, metrics)
    for (m, mix), (k, start) in itertools.product(enumerate(prism.MIXES), enumerate(prism.STARTS.values())):
        history = [{"step": step, "reward": 0.1 * k + 0.05 * m + 0.02 * step + 0.01 * seed} for step in range(1, 8)]
        publish(root, f"rl/grpo/prism_{mix}-{start}", seed, {"history.jsonl": history})
    for (m, mid), (r, rl) in itertools.product(enumerate(prism.MIXES), repeat=2):
        rows = []
        for f, family in enumerate(FAMILIES):
            for i in range(8):
                correct = (i + f + seed) % 3 + m * (1 + i % 2) + r * (i % 2) + m * r
                rows.append({"id": f"{family}{i}", "family": family, "n": 8, "correct": correct, "correct_ungated": 8})
        publish(root, f"evaluate/reasoning/prism-{mid}_rl_{rl}", seed, {"items.parquet": rows})
    write_lineage(root, seed)
    counts = [0, 1, 4, 5, 12, 13, 16]
    passes = [{"id": f"p{c}", "family": "math", "n": 16, "correct": c} for c in counts]
    publish(root, "rl/passes/prism-mcs", seed, {"passes.parquet": passes})
    rewards = [
        {"step": step, "id": f"p{c}", "family": "math", "n": 8, "correct": 8.0 * (step >= 10) if c == 1 else 2.0 + seed}
        for step in range(20)
        for c in (1, 4, 5, 12)
    ]
    rewards.append({"step": 19, "id": "unknown", "family": "math", "n": 8, "correct": 8.0})  # of no counted prompt
    publish(root, "rl/grpo/prism_filtered-mcs", seed, {"rewards.parquet": rewards, "history.jsonl": [{"step": 1, "reward": 0.5}]})


def rate(a: float, b: float, seed: int = 0) -> float:
    return round(0.1 + 0.3 * a + 0.4 * b + 0.03 * (seed - 1), 6)


def write_lineage(root: Path, seed: int, files=("cka.parquet", "landscape.parquet"), name: str = "prism") -> None:
    tables = {
        "tensors.parquet": [{"pair": "base>mid", "tensor": "x", "divergence": 0.1}],
        "cka.parquet": [
            {"pair": pair, "layer": layer, "centred": 0.9 - 0.1 * k - 0.05 * layer - 0.01 * seed, "uncentred": 0.999}
            for k, pair in enumerate(PAIRS)
            for layer in range(3)
        ],
        "landscape.parquet": [
            {"a": a, "b": b, "pass_rate": rate(a, b, seed), "n": 4, "path": path} for (a, b), path in points(3, 4).items()
        ],
    }
    publish(root, f"evaluate/lineage/{name}", seed, {n: tables[n] for n in ("tensors.parquet", *files)})


@pytest.fixture(scope="module")
def prism_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("prism")
    for seed in SEEDS:
        write_prism(root, seed)
    return root


@pytest.mark.parametrize("seeds", [SEEDS, (1,)])
def test_every_plot_of_prism_is_written(prism_root, tmp_path, seeds):
    found = write(prism, prism_root, tmp_path / "a", seeds)
    assert found.keys() == SECTIONS["prism"].keys()
    for name, content in found.items():
        (child,) = [c.get("id") for c in ElementTree.fromstring(content) if c.get("id")]
        assert child == f"{name}-prism"
        words = " ".join(texts(content))
        assert ("one seed" in words) == (len(seeds) == 1) and ("mean over 3 seeds" in words) == (len(seeds) == 3), name
    if len(seeds) == 3:
        assert write(prism, prism_root, tmp_path / "b", seeds) == found


def test_plots_without_results_say_what_is_missing(tmp_path):
    for module, names in ((prism, SECTIONS["prism"]), (d3, SECTIONS["d3"])):
        found = write(module, tmp_path / "nothing", tmp_path / module.__name__)
        assert found.keys() == names.keys()
        for content in found.values():
            (heading, sentence) = texts(content)
            assert heading in ("prism", "d3") and sentence.endswith(".")


def test_retention_curves_begin_at_the_base(prism_root):
    figure = prism.prism_retention(data(prism_root), "prism")
    loss, recall = figure.axes
    for k, mix in enumerate(prism.MIDS):
        steps, values = line(loss, prism.colour(mix))
        assert steps == [0, 100, 200] and values == pytest.approx([2.01, 1.91 + 0.1 * k, 1.81 + 0.1 * k])
        steps, values = line(recall, prism.colour(mix))
        assert steps == [0, 100, 200] and values == pytest.approx([0.125, 0.3 + 0.1 * k, 0.4 + 0.1 * k])
    band = loss.collections[0].get_paths()[0].vertices[:, 1]  # lowest to highest seed
    assert band.max() == pytest.approx(2.02) and band.min() == pytest.approx(1.80)
    assert [t for t in texts(figure) if t in prism.MIDS] == [*prism.MIDS, *prism.MIDS]


def test_a_mix_that_one_seed_lacks_is_left_out(prism_root, tmp_path):
    for seed in SEEDS:
        for mix in prism.MIDS[: 3 if seed else 5]:
            publish(
                tmp_path,
                f"midtrain/prism/{mix}",
                seed,
                {"history.jsonl": [{"step": 100, "held_out/prose": 1.0}]},
                {"before/held_out/prose": 2.0},
            )
    figure = prism.prism_retention(data(tmp_path), "prism")
    assert [t for t in texts(figure) if t in prism.MIDS] == list(prism.MIDS[:3])
    assert not figure.axes[1].lines  # no recall was measured


def test_rl_curves_stand_by_mix_and_start(prism_root):
    figure = prism.prism_rl(data(prism_root), "prism")
    for m, axes in enumerate(figure.axes):
        assert axes.get_title("left") == f"RL mix {prism.MIXES[m].upper()}"
        for k, label in enumerate(prism.STARTS):
            steps, values = line(axes, prism.colour(label), style="--" if label == "base" else "-")
            assert steps == list(range(1, 8))
            assert values == pytest.approx([0.1 * k + 0.05 * m + 0.02 * s + 0.01 for s in steps])  # linear, so smoothing keeps it
    assert prism.colour("base") == MUTED and len({prism.colour(label) for label in prism.STARTS}) == len(prism.STARTS)


def expected_effects(family: str, seeds) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {"mid": [], "rl": [], "interaction": []}
    f, i = FAMILIES.index(family), np.arange(8)
    for seed in seeds:
        cells = {
            mid: {rl: ((i + f + seed) % 3 + m * (1 + i % 2) + r * (i % 2) + m * r) / 8 for r, rl in enumerate(prism.MIXES)}
            for m, mid in enumerate(prism.MIXES)
        }
        for name in found:
            found[name].append(getattr(main_effects(cells), name))
    return found


@pytest.mark.parametrize("seeds", [SEEDS, (1,)])
def test_effects_are_those_of_the_four_cells(prism_root, seeds):
    figure = prism.prism_effects(data(prism_root, seeds), "prism")
    for axes, family in zip(figure.axes, FAMILIES, strict=True):
        assert axes.get_title("left") == family
        for row, (name, values) in enumerate(expected_effects(family, seeds).items()):
            estimate, low, high = bootstrap(values)
            assert line(axes, COLOURS[row], "s") == ([pytest.approx(estimate)], [row]), name
            assert line(axes, COLOURS[row])[0] == pytest.approx([low, high])
            assert line(axes, COLOURS[row], "o")[0] == pytest.approx([v.mean() for v in values])


def test_effects_pair_cells_by_item(prism_root, tmp_path):
    """Rows of one cell in another order change nothing; other items are refused."""
    import shutil

    shutil.copytree(prism_root, tmp_path / "copy")
    before = prism.cells(data(tmp_path / "copy"), "math")
    rows = data(prism_root).rows(data(prism_root).path("evaluate/reasoning/prism-mcs_rl_mc", 0), "items.parquet")
    publish(tmp_path / "copy", "evaluate/reasoning/prism-mcs_rl_mc", 0, {"items.parquet": rows[5:] + rows[:5]})
    after = prism.cells(data(tmp_path / "copy"), "math")
    assert all((before[0][m][r] == after[0][m][r]).all() for m in prism.MIXES for r in prism.MIXES)
    publish(tmp_path / "copy", "evaluate/reasoning/prism-mcs_rl_mc", 0, {"items.parquet": rows[1:]})
    with pytest.raises(UserError, match=r"prism-mcs_rl_mc was evaluated on other items"):
        prism.cells(data(tmp_path / "copy"), "math")


def test_similarity_by_layer_is_the_mean_over_seeds(prism_root):
    (axes,) = (figure := prism.prism_cka(data(prism_root), "prism")).axes
    for k in range(len(PAIRS)):
        layers, values = line(axes, COLOURS[k], style="-")
        assert layers == [0, 1, 2] and values == pytest.approx([0.89 - 0.1 * k - 0.05 * layer for layer in layers])
        assert line(axes, COLOURS[k], style=":")[1] == pytest.approx([0.999] * 3)
    assert {"base → mid", "mid → rl", "base → rl"} <= set(texts(figure))


def test_a_lineage_without_corpus_or_task_gives_a_note(tmp_path):
    write_lineage(tmp_path, 0, files=())
    assert "The representations of no lineage were compared." in texts(prism.prism_cka(data(tmp_path, (0,)), "prism"))
    assert "No plane between checkpoints was evaluated." in texts(prism.prism_landscape(data(tmp_path, (0,)), "prism"))
    write_lineage(tmp_path, 0, name="second")
    assert len(prism.prism_cka(data(tmp_path, (0,)), "prism").axes) == 1  # the one that has them
    assert len(prism.prism_landscape(data(tmp_path, (0,)), "prism").axes) == 2
    assert not prism.prism_landscape(data(tmp_path, (0, 1)), "prism").axes  # in one seed alone


def test_the_plane_shows_every_point_where_it_lies(prism_root):
    figure = prism.prism_landscape(data(prism_root), "prism")
    grid = np.asarray(figure.axes[0].images[0].get_array())
    side = (0.0, 0.5, 1.0)
    assert grid == pytest.approx(np.array([[rate(a, b, 1) for a in side] for b in side]))  # rows b, columns a; mean over seeds
    assert figure.axes[0].images[0].origin == "lower"
    shown = {(t.get_position()): t.get_text() for t in figure.axes[0].texts}
    assert shown[2, 0] == f"{rate(1, 0, 1):.2f}" and shown[0, 2] == f"{rate(0, 1, 1):.2f}" and len(shown) == 9
    places, values = line(figure.axes[1], COLOURS[0], "o")
    wanted = {a + b: rate(a, b, 1) for (a, b), on_path in points(3, 4).items() if on_path}
    assert places == pytest.approx(sorted(wanted)) and values == pytest.approx([wanted[p] for p in sorted(wanted)])
    assert places[0] == 0 and places[-1] == 2 and values[-1] == pytest.approx(0.8)


def test_the_frontier_groups_prompts_by_their_first_count(prism_root):
    """Prompt p1 is never right before step 10 and always after; with p4 it makes up `1 to 4`."""
    (axes,) = (figure := prism.prism_frontier(data(prism_root), "prism")).axes
    steps, values = line(axes, COLOURS[1], "o")
    other = 3.0 / 8  # p4: 2 + seed of 8, mean over seeds
    assert steps == [2.0 * b + 1 for b in range(10)]
    assert values == pytest.approx([other / 2] * 5 + [(1 + other) / 2] * 5)
    assert line(axes, COLOURS[2], "o")[1] == pytest.approx([other] * 10)
    words = texts(figure)
    assert {"1 to 4 of 16 (2)", "5 to 8 of 16 (1)", "9 to 12 of 16 (1)"} <= set(words)
    assert not any(w.startswith(("0 of 16", "16 of 16", "13 to 15")) for w in words)  # filtered out, never met


# --- D3 ---------------------------------------------------------------------------------------------------------

ETAS, PROBLEMS = (0.02, 0.05), 12
D = np.array([[0.0, 0.03, -0.002], [-0.03, 0.0, 0.008], [0.002, -0.008, 0.0]])


def write_d3(root: Path, seeds, schedules=d3.SCHEDULES) -> None:
    regrets = [
        {"problem": p, "eta": eta, **{m: 0.05 * k + eta + 0.01 * p for k, m in enumerate(d3.METHODS)}}
        for eta in ETAS
        for p in range(PROBLEMS)
    ]
    publish(root, d3.TESTBED, 0, {"regrets.parquet": regrets})
    for seed, (k, schedule) in itertools.product(seeds, enumerate(schedules)):
        curves = [
            {"replicate": r, "step": step, "loss": 1.6 - 0.01 * step - 0.02 * k + 0.1 * r + 0.01 * seed, "loss_1": 9.0}
            for step in (0, 20, 40)
            for r in (0, 1)
        ]
        rows = [
            {"replicate": r, "schedule": schedule, "steps_to_90": 20 + k if r == 0 else 40, "censored": r == 1} for r in (0, 1)
        ]
        files = {"curves.parquet": curves, "replicates.parquet": rows}
        if schedule in ("d3", "d3_reversed"):
            files["orders.parquet"] = [
                {"replicate": r, "window": w, "order": [3 * w + u for u in ((0, 1, 2), (1, 0, 2))[w == 1]], "above": 2}
                for r in (0, 1)
                for w in range(4)
            ]
            files["influence.parquet"] = [
                {
                    "replicate": r,
                    "window": w,
                    "edge": edge,
                    "i": i,
                    "j": j,
                    "A": 0.0,
                    "se": 0.0,
                    "D": (1 + w) * D[i, j] * sign,
                    "se_D": 0.005,
                }
                for r, sign in ((0, 1), (1, -1))
                for w in range(4)
                for edge in ("raw_fd", "other")
                for i in range(3)
                for j in range(3)
            ]
        publish(root, f"midtrain/d3/chain_{schedule}", seed, files)


@pytest.fixture(scope="module")
def d3_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("d3")
    write_d3(root, SEEDS)
    return root


@pytest.mark.parametrize("seeds", [SEEDS, (1,)])
def test_every_plot_of_d3_is_written(d3_root, tmp_path, seeds):
    found = write(d3, d3_root, tmp_path / "a", seeds)
    assert found.keys() == SECTIONS["d3"].keys()
    for name, content in found.items():
        assert [c.get("id") for c in ElementTree.fromstring(content) if c.get("id")] == [f"{name}-d3"]
    assert ("mean over 3 seeds" in " ".join(texts(found["d3_curves"]))) == (len(seeds) == 3)
    if len(seeds) == 3:
        assert write(d3, d3_root, tmp_path / "b", seeds) == found


def test_regret_is_the_mean_over_problems_by_step_size(d3_root):
    (axes,) = (figure := d3.d3_testbed(data(d3_root, (7,)), "d3")).axes  # exact: under seed0 whatever the study's seeds
    for shift, eta in enumerate(ETAS):
        dots = [one for one in axes.lines if one.get_color() == COLOURS[shift] and one.get_marker() == "o"]
        assert [one.get_xdata()[0] for one in dots] == pytest.approx([0.05 * k + eta + 0.055 for k in range(len(d3.METHODS))])
        assert [round(one.get_ydata()[0]) for one in dots] == list(range(len(d3.METHODS)))
        bars = [one for one in axes.lines if one.get_color() == COLOURS[shift] and one.get_marker() == "None"]
        for k, bar in enumerate(bars):
            _, low, high = bootstrap([0.05 * k + eta + 0.01 * np.arange(PROBLEMS)], resamples=1000)
            assert list(bar.get_xdata()) == pytest.approx([low, high])
    words = texts(figure)
    assert any("12 problems" in w for w in words) and {"step size 0.02", "step size 0.05"} <= set(words)
    assert [t.get_text() for t in axes.get_yticklabels()] == list(d3.METHODS.values())


def test_loss_and_steps_by_schedule(d3_root):
    loss, steps = d3.d3_curves(data(d3_root), "d3").axes
    for k, schedule in enumerate(d3.SCHEDULES):
        x, y = line(loss, d3.colour(schedule))
        assert x == [0, 20, 40] and y == pytest.approx([1.66 - 0.01 * s - 0.02 * k for s in x])  # replicates and seeds
        filled, hollow = [one for one in steps.lines if one.get_color() == d3.colour(schedule) and one.get_marker() == "o"]
        assert list(filled.get_xdata()) == [20 + k] * 3 and list(hollow.get_xdata()) == [40] * 3
        assert hollow.get_markerfacecolor() == "#ffffff" and set(filled.get_ydata()) == {k}
    means = [one.get_xdata()[0] for one in steps.lines if one.get_marker() == "|"]
    assert means == [30 + k / 2 for k in range(len(d3.SCHEDULES))]
    assert [t.get_text() for t in steps.get_yticklabels()] == list(d3.SCHEDULES)


def test_schedules_that_one_seed_lacks_are_left_out(tmp_path):
    write_d3(tmp_path, (0,))
    write_d3(tmp_path, (1,), ("random", "grab"))
    assert d3.schedules(data(tmp_path, (0, 1))) == ["random", "grab"]
    assert len({d3.colour(s) for s in d3.SCHEDULES}) == len(d3.SCHEDULES)


def test_the_graph_is_that_of_one_window(d3_root):
    """Of four windows the second, of replicate 0 and the definition that D3 uses; edges above one standard error."""
    figure = d3.d3_graph(data(d3_root), "d3")
    matrix, graph = figure.axes
    assert np.asarray(matrix.images[0].get_array()) == pytest.approx(2 * D)
    shown = {t.get_position(): t.get_text() for t in matrix.texts}
    assert shown[1, 0] == "60.0" and shown[0, 1] == "-60.0" and shown[2, 1] == "16.0" and len(shown) == 6
    assert any("window 1" in t and "Order chosen: 2 → 1 → 3." in t for t in (" ".join(texts(figure)),))
    edges = [t for t in graph.texts if getattr(t, "arrow_patch", None)]
    place = {0: 1, 1: 0, 2: 2}
    drawn = {(t.xyann[0], t.xy[0]): t.arrow_patch.get_edgecolor()[:3] for t in edges}
    assert drawn.keys() == {(place[0], place[1]), (place[1], place[2])}  # D[2, 0] = 0.004 is within its error
    assert drawn[1, 0] != drawn[0, 2]  # against the order, and along it
    assert [t.get_text() for t in graph.texts if t not in edges] == ["2", "1", "3"]


def test_influence_of_another_definition_gives_a_note(tmp_path):
    write_d3(tmp_path, (0,), ("d3",))
    where = data(tmp_path, (0,)).path("midtrain/d3/chain_d3", 0)
    tables = {n: data(tmp_path, (0,)).rows(where, n) for n in ("curves.parquet", "replicates.parquet", "orders.parquet")}
    rows = [row for row in data(tmp_path, (0,)).rows(where, "influence.parquet") if row["edge"] == "other"]
    publish(tmp_path, "midtrain/d3/chain_d3", 0, {**tables, "influence.parquet": rows})
    assert "The influence raw_fd was not measured." in texts(d3.d3_graph(data(tmp_path, (0,)), "d3"))


def test_a_partial_study_names_the_file_that_is_missing(prism_root, tmp_path):
    publish(
        tmp_path, "evaluate/reasoning/prism-mc_rl_mc", 0, {"items.parquet": [{"id": "0", "family": "math", "n": 1, "correct": 1}]}
    )
    with pytest.raises(UserError, match=r"prism-mc_rl_mcs/seed0/manifest.json does not exist"):
        prism.prism_effects(data(tmp_path, (0,)), "prism")


def test_the_plots_of_a_section_are_those_of_its_module():
    for name, module in (("prism", prism), ("d3", d3)):
        assert {draw.__name__ for draw in module.PLOTS} == SECTIONS[name].keys()
        assert all(draw.__module__ == module.__name__ for draw in module.PLOTS)
