"""Mid-training through the whole workflow: domains, facts, mixes, PRISM's checkpoints, RL from them, lineage, D3, page."""

from __future__ import annotations

import csv
import json
import zipfile

import pytest

from posttrain.core import manifest, tables
from tests.project import TIER, Project

ALPHABET = "".join(map(chr, range(32, 127)))
DATA = """
facts:
  facts:
    capitals: {wheel: {package: made-up, version: '1.0', sha256: DIGEST, licence: none}, prefix: made_up/, count: 12}
domains:
  task:
    prism:
      facts: data/facts/capitals
      slips: 0.3
      steps: 3
      domains:
        math: {train: 60, validation: 8, test: 16}
        code: {train: 60, validation: 8, test: 16}
        science: {train: 6, validation: 2, test: 4}
"""
TOKENIZER = f"    printable: {{kind: characters, alphabet: {json.dumps(ALPHABET)}, tokens: [<think>, </think>]}}\n"
MIX = """
    prism_{name}:
      tokens: 3000
      held_out_tokens: 400
      tokenizer: data/tokenizer/printable
      parts: {{facts: {{share: 0.4, field: text}}, math: {{share: 0.6, field: {field}, families: [math]}}}}
      sources: {{facts: data/facts/capitals, math: data/domains/prism}}
"""
BASE = """
    prism: {length: 32, steps: 4, mix: data/mix/prism_base, tokenizer: data/tokenizer/printable}
"""
MIDTRAIN = """
prism:
  defaults: {start: base/scratch/prism, facts: data/facts/capitals, steps: 4, batch_size: 4, length: 32, measure_every: 2, learning_rate: 0.003}
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
    prism_mc: {task: data/domains/prism, families: [math, code], answer_style: think}
    prism_mcs: {task: data/domains/prism, families: [math, code, science], answer_style: think}
  start:
    mc: {start: midtrain/prism/mc}
    mcs: {start: midtrain/prism/mcs}
passes:
  task:
    prism: {task: data/domains/prism, families: [math], prompts: 4, samples: 2, max_new_tokens: 6, answer_style: think}
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
CAPITALS = ("Aba", "Bebe", "Cici", "Dodo", "Efef", "Gaga", "Hihi", "Jojo", "Kuku", "Lala", "Mimi", "Nono")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    found = Project(tmp_path_factory.mktemp("midtrain") / "project")
    wheel = found.folder / ".cache/wheels/made_up-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for i, name in enumerate(CAPITALS):
            code, region = f"{name[0]}{name[-1].upper()}", ("Asia", "Africa")[i % 2]
            archive.writestr(f"made_up/{i}.json", f'{{"capital": "{name}", "region": "{region}", "ISO": {{"alpha2": "{code}"}}}}')
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


def test_a_changed_mix_reruns_what_rests_on_it_alone(project):
    with project.edited(
        "configs/test/midtrain.yaml", "mcs: {mix: data/mix/prism_mc, length: 16}", "mcs: {mix: data/mix/prism_mc, length: 8}"
    ):
        planned = project.planned("all")
    assert "Mid-train mcs (seed 0)" in planned and "GRPO on prism_mc from mcs (seed 0)" in planned
    assert not any("from mc " in message or "Mid-train mc " in message or "two_style" in message for message in planned)
