"""Mid-training through the whole workflow: domains, facts, mixes, PRISM's checkpoints, RL from them, lineage, D3, page."""

from __future__ import annotations

import csv
import json
import zipfile

import pytest

from posttrain.core import manifest, tables
from posttrain.core.tracking import read_history
from tests.project import TIER, Project

ALPHABET = "".join(map(chr, range(32, 127)))
DATA = """
facts:
  facts:
    cities: {wheel: {package: made-up, version: '1.0', sha256: DIGEST, licence: none}, prefix: made_up/, count: 12}
domains:
  defaults: {facts: data/facts/cities, steps: 3}
  task:
    prism:
      domains:
        math: {train: 60, validation: 8, test: 16}
        code: {train: 60, validation: 8, test: 16}
        science: {train: 4, validation: 2, test: 4}
    prism_rl:
      apart_from: data/domains/prism
      domains: {math: {train: 24}, code: {train: 24}, science: {train: 2}}
"""
TOKENIZER = f"    printable: {{kind: characters, alphabet: {json.dumps(ALPHABET)}, tokens: [<think>, </think>]}}\n"
MIX = """
    prism_{name}:
      tokens: 3000
      held_out_tokens: 400
      tokenizer: data/tokenizer/printable
      parts: {{facts: {{share: 0.4, field: text}}, math: {{share: 0.6, field: {field}, families: [math]}}}}
      sources: {{facts: data/facts/cities, math: data/domains/prism}}
"""
BASE = """
    prism: {length: 32, steps: 4, mix: data/mix/prism_base, tokenizer: data/tokenizer/printable}
"""
MIDTRAIN = """
prism:
  defaults: {start: base/scratch/prism, facts: data/facts/cities, steps: 4, batch_size: 4, length: 32, measure_every: 2, learning_rate: 0.003}
  model:
    mc: {mix: data/mix/prism_mc}
    mcs: {mix: data/mix/prism_mc, length: 16}
    mcs_long: {mix: data/mix/prism_mc, start: midtrain/merge/mcs, trainable: attention, overlap: 4}
merge:
  model:
    mcs: {start: base/scratch/prism, other: midtrain/prism/mcs}
testbed:
  bed:
    uniform: {problems: 8}
d3:
  defaults: {replicates: 2, windows: 2, steps_per_unit: 2, batch_size: 8, micro: 2, probe_rows: 4, validation: 8, evaluate_every: 2}
  arm:
    chain_random: {schedule: random}
    chain_d3: {schedule: d3}
"""
RL = """
    prism_mc: {task: data/domains/prism_rl, families: [math, code], answer_style: think}
    prism_mcs: {task: data/domains/prism_rl, families: [math, code, science], answer_style: think}
  start:
    mc: {start: midtrain/prism/mc}
    mcs: {start: midtrain/prism/mcs}
passes:
  task:
    prism: {task: data/domains/prism_rl, families: [math], prompts: 4, samples: 2, max_new_tokens: 6, answer_style: think}
  checkpoint:
    mcs: {model: midtrain/prism/mcs}
"""
EVALUATE = """
    prism: {task: data/domains/prism, families: [math, code, science], items: 12, samples: 2, k: [1], max_new_tokens: 6, answer_style: think, group: prism}
  checkpoint:
    prism_base: {model: base/scratch/prism, group: prism}
    mcs_long: {model: midtrain/prism/mcs_long, group: prism}
CELLS
lineage:
  lineage:
    prism:
      models: {base: base/scratch/prism, mid: midtrain/prism/mcs, rl: rl/grpo/prism_mcs-mcs}
      path: [base, mid, rl]
      task: data/domains/prism
      families: [math]
      items: 4
      grid: 2
      path_points: 2
      max_new_tokens: 6
      answer_style: think
"""
CITIES = ("Aba", "Bebe", "Cici", "Dodo", "Efef", "Gaga", "Hihi", "Jojo", "Kuku", "Lala", "Mimi", "Nono")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    found = Project(tmp_path_factory.mktemp("midtrain") / "project")
    wheel = found.folder / ".cache/wheels/made_up-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        codes = [f"{name[0]}{name[-1].upper()}" for name in CITIES]
        cities = {i: {"name": name, "countrycode": codes[i], "population": 1} for i, name in enumerate(CITIES)}
        archive.writestr("made_up/cities15000.json", json.dumps(cities))
        countries = {code: {"continentcode": ("AS", "AF")[i % 2]} for i, code in enumerate(codes)}
        archive.writestr("made_up/countries.json", json.dumps(countries))
    folder = found.folder / "configs/test"
    data = TIER["data"].replace("tokenizer:\n  tokenizer:\n", "tokenizer:\n  tokenizer:\n" + TOKENIZER)
    mixes = "".join(MIX.format(name=n, field=f) for n, f in (("base", "web"), ("mc", "demonstration")))
    cells = "".join(
        f"    {m}_rl_{r}: {{model: rl/grpo/prism_{r}-{m}, group: prism}}\n" for m in ("mc", "mcs") for r in ("mc", "mcs")
    )
    (folder / "data.yaml").write_text(data.rstrip() + mixes + DATA.replace("DIGEST", manifest.sha256(wheel)))
    (folder / "base.yaml").write_text(TIER["base"].rstrip() + BASE)
    (folder / "midtrain.yaml").write_text(MIDTRAIN)
    (folder / "rl.yaml").write_text(TIER["rl"].rstrip() + RL)
    (folder / "evaluate.yaml").write_text(TIER["evaluate"].rstrip() + EVALUATE.replace("CELLS\n", cells))
    found.run()
    return found


def test_the_study_ends_in_a_page_with_both_methods(project):
    page = (project.results / "report/index.html").read_text()
    assert 'id="method-prism"' in page and 'id="method-d3"' in page and "<code>mcs_rl_mc</code>" in page
    assert project.planned("all") == set()


def test_the_dashboard_has_a_curve_of_what_is_kept(project):
    names = {name for row in read_history(project.results / "midtrain/prism/mc/seed0/history.jsonl") for name in row}
    assert {"loss", "fact_recall", "held_out/facts"} <= names  # held_out/<source> of the mix, which has no prose in this tier
    done = project.snakemake("dashboard")
    page = (project.results / "report/dashboard.html").read_text()
    assert done.returncode == 0 and "recall of facts" in page.lower() and "Mid-training" in page
    (project.results / "report/dashboard.html").unlink()


def test_the_ledger_measures_what_the_tier_has_and_says_what_it_lacks(project):
    with open(project.results / "claims.csv") as stream:
        rows = {(row["method"], row["claim"]): row for row in csv.DictReader(stream)}
    assert rows["d3", "graph_beats_chance"]["n"] == "8" and rows["prism", "science_mid_mix"]["n"] == "4"
    assert rows["prism", "directions"]["verdict"] == "not testable here"  # this tier's lineage measures no direction
    assert rows["prism", "math_gain"]["verdict"] == "not testable here" and "prism-mcs" in rows["prism", "math_gain"]["reason"]


def test_rl_starts_from_what_the_configuration_names(project):
    made = project.results / "rl/grpo/prism_mcs-mc/seed0"
    start = manifest.sha256(project.results / "midtrain/prism/mc/seed0/manifest.json")
    assert manifest.read(made / "manifest.json", verify=False).inputs["start"] == start
    families = {row["family"] for row in tables.read(made / "rewards.parquet")}
    assert families == {"math", "code", "science"}


def test_test_items_share_no_operands_with_training(project):
    rows = tables.read(project.results / "data/domains/prism/seed0/items.parquet")
    prompts = {split: {row["prompt"] for row in rows if row["split"] == split} for split in ("train", "validation", "test")}
    assert not prompts["test"] & (prompts["train"] | prompts["validation"])
    drawn = {row["prompt"] for row in tables.read(project.results / "data/domains/prism_rl/seed0/items.parquet")}
    assert len(drawn) == 50 and not drawn & set().union(*prompts.values())  # RL draws none that mid-training has seen


def test_a_changed_mix_reruns_what_rests_on_it_alone(project):
    with project.edited(
        "configs/test/midtrain.yaml", "mcs: {mix: data/mix/prism_mc, length: 16}", "mcs: {mix: data/mix/prism_mc, length: 8}"
    ):
        planned = project.planned("all")
    assert "Mid-train mcs (seed 0)" in planned and "GRPO on prism_mc from mcs (seed 0)" in planned
    assert not any("from mc " in message or "Mid-train mc " in message or "two_style" in message for message in planned)
