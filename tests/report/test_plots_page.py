"""Plots and page on a made-up study: complete, escaped, self-contained, reproducible, and clear about what is missing."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.core.manifest import Artifact, Manifest, Metric
from posttrain.report import claims, drawing, page, plots
from posttrain.report.artifacts import Artifacts
from posttrain.report.ledger import VERDICTS

ARMS = ("sft", "pear_token", "pear_sequence", "kl")
TASKS = ("near", "far")  # `far` has no retention evaluation
CODE = "<script>alert(1)</script>"
CLAIMS = """
pear:
  gain: {statement: s, paper_value: up <b>, source: q, kind: difference, task: near, arm: rl_pear_token, baseline: rl_sft, smallest_effect: 0.05, scope: z}
  loss: {statement: s, paper_value: p, source: q, kind: difference, task: near, arm: rl_sft, baseline: rl_pear_token, smallest_effect: 0.05, scope: z}
  lesser: {statement: s, paper_value: p, source: q, kind: difference, task: near, arm: rl_sft, baseline: rl_pear_token, smallest_effect: 0.05, control: true, scope: z}
  rank: {statement: s, paper_value: p, source: q, kind: reversal, task: far, score: likelihood, arms: [sft, pear_token, pear_sequence], smallest_effect: 0.05, scope: z}
  cost: {statement: s, paper_value: p, source: q, kind: overhead, task: near, arm: pear_token, baseline: sft, metric: step time ratio, bound: 1.05, scope: z}
  big: {statement: s, paper_value: p, source: q, kind: not_testable, scope: needs a cluster}
"""


class World:
    """Writes results as jobs would: real manifests, parquet files, histories and provenance."""

    def __init__(self, folder: Path, seeds: tuple[int, ...]) -> None:
        self.root, self.seeds, self.rng = folder / "results/t", seeds, np.random.default_rng(0)
        (folder / "claims.yaml").parent.mkdir(parents=True, exist_ok=True)
        (folder / "claims.yaml").write_text(CLAIMS)
        self.claims = folder / "claims.yaml"
        for seed in seeds:
            self.study(seed)
        options = {"seeds": seeds, "arms": ARMS, "root": self.root, "claims": self.claims}
        claims.main(claims.Config(output=self.root / "claims.csv", resamples=200, **options))

    def publish(self, reference, seed, files=None, metrics=None, inputs=(), card=None, config=None) -> str:
        stage, method, variant = reference.split("/")
        path = self.root / reference / f"seed{seed}" / manifest.NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, rows in (files or {}).items():
            if name.endswith(".jsonl"):
                (path.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                tables.write(rows, path.parent / name)
        found = Manifest(
            stage=stage,
            method=method,
            variant=variant,
            seed=seed,
            config=config or {},
            config_digest="",
            inputs=dict(zip(("model", "data"), inputs, strict=False)),
            artifacts={
                n: Artifact(sha256=manifest.sha256(path.parent / n), size=(path.parent / n).stat().st_size) for n in files or {}
            },
            metrics={n: v if isinstance(v, Metric) else Metric(value=v) for n, v in (metrics or {}).items()},
            card=card or {},
            device="cpu",
            packages={"torch": "2.0"},
        )
        path.write_text(found.model_dump_json())
        (path.parent / "provenance.json").write_text(json.dumps({"wall_seconds": 2.5, "peak_memory_mb": 300.0}))
        return manifest.sha256(path)

    def study(self, seed: int) -> None:
        rng = self.rng
        corpus = self.publish(
            "data/corpus/prose", seed, metrics={"documents/train": 9, "overlap/mean": 0.25}, card={"licences": {"x": "MIT"}}
        )
        for task in TASKS:
            data = self.publish(f"data/tasks/{task}", seed, metrics={"items/train": 5000, "items/test": 20}, config={"ngram": 13})
            base = self.publish(f"base/scratch/{task}", seed, inputs=[corpus, data])
            for skill, arm in enumerate(("base", *ARMS)):
                sft = base
                if arm != "base":
                    config = {"loss": "kl" if arm == "kl" else "nll", "weighting": arm}
                    names = ("weight_mean", "weight_ess", "weight_floor", "weight_cap") if arm.startswith("pear") else ()
                    history = [{"step": i, "loss": 1.0, **{n: rng.uniform() for n in names}} for i in range(1, 7)]
                    files = {
                        "validation.parquet": [{"nll": skill + rng.normal(), "tokens": 9} for _ in range(20)],
                        "history.jsonl": history,
                    }
                    metrics = {"validation/nll_per_trace": Metric(value=float(skill), n=20, se=0.1)}
                    metrics |= {"weights/mean": 0.5, "weights/ess": 0.25} if names else {}
                    sft = self.publish(f"sft/train/{task}-{arm}", seed, files, metrics, [base], config=config)
                rollouts = [{"prompt": "1+1=", "completion": CODE, "answer": "2", "reward": float(i % 2)} for i in range(4)]
                history = [{"step": i, "reward": min(1.0, 0.1 * skill + 0.05 * i)} for i in range(1, 9)] + [
                    {"step": 9, "loss": 0.0}
                ]
                metrics = {"kl_to_start": Metric(value=0.3, n=8, se=0.02), "mean/frac_reward_zero_std": 0.125}
                rl = self.publish(
                    f"rl/grpo/{task}-{arm}", seed, {"history.jsonl": history, "rollouts.parquet": rollouts}, metrics, [sft]
                )
                for name, model in ((arm if arm == "base" else f"sft_{arm}", sft), (f"rl_{arm}", rl)):
                    gain = 6 if name.startswith("rl") else 0
                    items = [
                        {
                            "id": str(i),
                            "prompt": "1+1=",
                            "answer": "2",
                            "n": 16,
                            "correct": int(rng.integers(0, 3) + gain + skill),
                        }
                        for i in range(20)
                    ]
                    self.publish(
                        f"evaluate/reasoning/{task}-{name}",
                        seed,
                        {"items.parquet": items},
                        {},
                        [model, data],
                        config={"k": [1, 8]},
                    )
                    if task == "near":
                        rows = [{"nll": 700 + 50 * rng.normal(), "bytes": 300} for _ in range(8)]
                        self.publish(f"evaluate/retention/{task}-{name}", seed, {"documents.parquet": rows}, {}, [model, corpus])
        times = [{"sft": 1 + 0.01 * rng.normal(), "pear_token": 1 + 0.01 * rng.normal()} for _ in range(20)]
        self.publish("sft/overhead/near", seed, {"step_times.parquet": times})
        model = self.publish("base/packaged/pre", seed, metrics={"parameters": 1234.0}, card={"licence": "Apache-2.0"})
        items = [{"id": "0", "prompt": "p", "answer": "a", "first_response": CODE, "n": 1, "correct": 0} for _ in range(4)]
        metrics = {"pass@1": Metric(value=0.0, n=4, se=0.0)}
        self.publish("evaluate/reasoning/words-pre", seed, {"items.parquet": items}, metrics, [model])
        self.publish("data/mix/old", seed, metrics={"tokens/train": 77777.0})  # of an older configuration: nothing rests on it

    def options(self, tasks=TASKS) -> dict:
        return {"root": self.root, "seeds": self.seeds, "arms": ARMS, "tasks": tasks}

    def draw(self, folder: Path, tasks=TASKS) -> str:
        """Plots and page into `folder`; the page's text."""
        folder.mkdir(exist_ok=True)
        plots.main(plots.Config(output=folder / "rl_curves.svg", **self.options(tasks)))
        page.main(page.Config(output=folder / "index.html", claims=self.claims, **self.options(tasks)))
        return (folder / "index.html").read_text()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("three"), (0, 1, 2))


@pytest.fixture(scope="module")
def drawn(world, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("report")
    return folder, world.draw(folder)


def test_plots_are_xml_with_a_drawing_per_task(drawn):
    for name in page.PLOTS:
        root = ElementTree.parse(drawn[0] / f"{name}.svg").getroot()
        ids = [child.get("id") for child in root if child.get("id")]
        assert ids == [f"{name}-{task}" for task in TASKS]
        heights = [float(child.get("height")) for child in root if child.get("id")]
        assert float(root.get("viewBox").split()[3]) == pytest.approx(sum(heights), abs=0.01)


def test_plots_name_arms_and_what_is_missing(drawn):
    text = {name: (drawn[0] / f"{name}.svg").read_text() for name in page.PLOTS}
    assert all(f">{arm}<" in text[name] for name in ("rl_curves", "before_after") for arm in ("base", *ARMS))
    assert ">kl<" not in text["rank_reversal"] and ">kl<" not in text["weights"] and ">sft<" not in text["weights"]
    assert text["retention"].count("No retention evaluation on this task") == 1
    assert "Date" not in text["retention"] and "metadata" not in text["retention"]


def test_page_shows_every_row_of_the_ledger(world, drawn):
    with open(world.root / "claims.csv") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["verdict"] for row in rows} >= {"replicated", "contradicted", "not testable here"}
    for row in rows:
        assert f"pear.{row['claim']}<" in drawn[1]
    for verdict in VERDICTS:
        assert drawn[1].count(f">{verdict}</span>") == sum(row["verdict"] == verdict for row in rows)
    assert drawn[1].count('role="img" aria-label="') == sum(bool(row["estimate"]) for row in rows) + len(TASKS) * len(page.PLOTS)


def test_controls_stand_apart_and_are_not_counted(world, drawn):
    with open(world.root / "claims.csv") as stream:
        rows = [row for row in csv.DictReader(stream) if row["claim"] != "lesser"]
    assert "Controls, not claims of the paper: difference in pass@1" in drawn[1]
    assert f"Of {len(rows)} claims (controls not counted)" in drawn[1]
    for verdict in VERDICTS:
        assert f"<b>{sum(row['verdict'] == verdict for row in rows)}</b>{verdict}</div>" in drawn[1]


def test_page_is_escaped_and_loads_nothing(drawn):
    text = drawn[1]
    assert "&lt;script&gt;" in text and "<script" not in text and "up <b>" not in text
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text) and not re.findall(r"url\((?!#)", text)
    assert "@import" not in text and "<link" not in text and "http" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and {i[1:] for i in re.findall(r'href="(#[^"]+)"', text)} <= set(ids)


def test_page_holds_what_the_study_rests_on(drawn):
    text = drawn[1]
    assert "corpus/prose" in text and "x: MIT" in text and "77,777" not in text
    assert "reasoning/words-pre" in text and "1,234" in text and "Apache-2.0" in text
    found = re.search(r"<td>rl/grpo</td><td[^>]*>(\d+)</td><td[^>]*>([\d.,]+)</td>", text)
    jobs = 3 * len(TASKS) * (len(ARMS) + 1)
    assert found.groups() == (str(jobs), f"{2.5 * jobs:.1f}")


def test_second_run_is_byte_identical(world, drawn, tmp_path):
    world.draw(tmp_path / "again")
    for file in drawn[0].iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_one_seed_and_a_task_without_results(tmp_path):
    world = World(tmp_path, (4,))
    text = world.draw(tmp_path / "report", tasks=("near", "absent"))
    assert "one seed" in text and not re.search(r"mean over \d+ seeds", text)
    for words in ("No RL run", "No reasoning evaluation", "No SFT run", "No retention evaluation"):
        assert words in text


def test_missing_and_changed_files_are_named(tmp_path):
    world = World(tmp_path, (0,))
    draw = plots.Config(output=tmp_path / "rl_curves.svg", **world.options())
    show = page.Config(output=tmp_path / "index.html", claims=world.claims, **world.options())
    with pytest.raises(UserError, match=r"rl_curves.svg does not exist; build it"):
        page.main(show)
    gone = world.root / "evaluate/reasoning/far-rl_kl/seed0/manifest.json"
    text = gone.read_text()
    gone.unlink()
    with pytest.raises(UserError, match=r"far-rl_kl/seed0/manifest.json does not exist"):
        plots.main(draw)
    gone.write_text(text)
    history = world.root / "rl/grpo/near-sft/seed0/history.jsonl"
    history.write_text(history.read_text() + '{"step": 99, "reward": 1}\n')
    with pytest.raises(UserError, match=r"history.jsonl differs from what"):
        plots.main(draw)
    (world.root / "claims.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"claims.csv is not a claims ledger"):
        page.main(show)


def test_labels_keep_their_order_and_distance():
    wanted = [0.5, 0.52, 0.51, 0.9, 0.0]
    places = drawing.spread(wanted, 0.1, 0.0, 1.0)
    assert sorted(range(5), key=wanted.__getitem__) == sorted(range(5), key=places.__getitem__)
    assert min(np.diff(sorted(places))) >= 0.1 - 1e-9 and places[3] == 0.9 and min(places) == 0.0
    assert max(drawing.spread([1.0, 1.0, 1.0], 0.1, 0.0, 1.0)) == pytest.approx(1.0)


def test_colours_do_not_depend_on_the_plot(world):
    data = Artifacts(plots.Config(output=Path("x.svg"), **world.options()))
    assert len({data.colour(start) for start in data.starts}) == len(data.starts)
