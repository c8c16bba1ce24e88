"""Distillation and edits through the whole workflow: known sources, students, edits of a world and of a user's own file,
evaluation of an edited model, ledger, page."""

from __future__ import annotations

import csv
import random
import zipfile

import pytest

from posttrain.core import manifest, tables
from posttrain.data.edit_world import ALPHABET
from tests.project import TIER, Project

DATA = """
edits:
  edits:
    world: {kind: world, subjects: 16, count: 4}
    mine: {kind: file, file: mine.jsonl}
corpus:
  corpus:
    digits:
      sources:
        digits: {wheel: {package: made-up, version: '1.0', sha256: DIGEST, licence: none}, prefix: made_up/, suffix: .txt}
"""
TOKENIZER = f"    world: {{kind: characters, alphabet: '{ALPHABET}'}}\n"
MIX = """
    world:
      tokens: 6000
      held_out_tokens: 600
      tokenizer: data/tokenizer/world
      parts: {facts: {share: 0.6, field: expression, families: [facts]}, markov: {share: 0.4, field: expression, families: [markov]}}
      sources: {facts: data/edits/world, markov: data/edits/world}
"""
BASE = "    edit_world: {mix: data/mix/world, tokenizer: data/tokenizer/world}\n"
DISTILL = """
source:
  source:
    markov: {count: 3, vocabulary: 24}
known:
  defaults: {source: distill/source/markov, replicates: 2, steps: 8, batch_size: 4, length: 8, width: 8, heads: 2, rates: [0.01, 0.02], held_out: 8}
  arm:
    kd: {divergence: {kind: kl}}
    tad: {divergence: {kind: tad, k: 10, beta: 2}}
grid:
  defaults: {source: distill/source/markov, replicates: 2, steps: 4, batch_size: 4, length: 8, width: 8, heads: 2, held_out: 8}
  study:
    known: {heads_k: [1, 10], betas: [1, 2]}
teacher:
  task:
    addition: {model: base/scratch/two_style, traces: sft/traces/two_style, length: 64}
tail_kd:
  defaults: {steps: 4, batch_size: 8, length: 32, held_out_rows: 8, measure_every: 2, head: 5, teacher: base/scratch/two_style}
  task:
    prose: {mix: data/mix/two_style, shape: {hidden: 8, layers: 1, heads: 2, intermediate: 16}}
    addition: {student: start, start: base/scratch/two_style, traces: sft/traces/two_style, statistics: distill/teacher/addition, length: 64}
  arm:
    kd: {divergence: {kind: kl}}
    tad: {divergence: {kind: tad, k: 5, beta: 2}}
overhead:
  task:
    prose: {teacher: base/scratch/two_style, mix: data/mix/two_style, shape: {hidden: 8, layers: 1, heads: 2, intermediate: 16}, repeats: 3, warmup_batches: 1, batch_size: 4, length: 32}
"""
EDIT = """
factors:
  task:
    mine: {model: base/scratch/two_style, capability: data/corpus/digits, layers: ["*.down_proj"], texts: 8, tokens: 32}
crispedit:
  defaults: {learning_rate: 0.01, batch: 4, epochs: 4, leading_space: false, refresh: null, texts: 8, tokens: 32, drift_texts: 4, drift_tokens: 32, max_new_tokens: 4}
  arm:
    world_ft: &world {projection: none, model: base/scratch/edit_world, edits: data/edits/world, capability: data/edits/world, drift_sources: [markov]}
    world_crisp: {<<: *world, projection: grad}
    mine: {model: base/scratch/two_style, edits: data/edits/mine, capability: data/corpus/digits, factors: edit/factors/mine}
"""
REASONING = """
    crispedit: {task: data/tasks/two_style, items: 16, samples: 8, k: [1], max_new_tokens: 6, group: crispedit}
  checkpoint: &models
    unedited: {model: base/scratch/two_style, group: crispedit}
    mine: {model: edit/crispedit/mine, group: crispedit}
retention:
  task:
    crispedit: {corpus: data/corpus/digits, documents: 4, tokens: 32, group: crispedit}
  checkpoint: *models
"""
MINE = """{"subject": "12", "prompt": "12=", "target": "a3", "gold": "b4", "paraphrases": ["012="]}
{"subject": "34", "prompt": "34=", "target": "b5", "neighbours": [["35=", "a6"]]}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    found = Project(tmp_path_factory.mktemp("distill_edit") / "project")
    wheel = found.folder / ".cache/wheels/made_up-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    draw = random.Random(0)
    with zipfile.ZipFile(wheel, "w") as archive:
        for i in range(30):
            archive.writestr(f"made_up/{i}.txt", "".join(draw.choice("0123456789=ab#") for _ in range(40)))
    folder = found.folder / "configs/test"
    data = TIER["data"].replace("tokenizer:\n  tokenizer:\n", "tokenizer:\n  tokenizer:\n" + TOKENIZER)
    (folder / "data.yaml").write_text(data.rstrip() + MIX + DATA.replace("DIGEST", manifest.sha256(wheel)))
    (folder / "base.yaml").write_text(TIER["base"].rstrip() + "\n" + BASE)
    (folder / "distill.yaml").write_text(DISTILL)
    (folder / "edit.yaml").write_text(EDIT)
    (folder / "evaluate.yaml").write_text(TIER["evaluate"].rstrip() + REASONING)
    (found.folder / "mine.jsonl").write_text(MINE)
    found.run()
    return found


def test_the_study_ends_in_a_page_with_both_methods(project):
    page = (project.results / "report/index.html").read_text()
    assert 'id="method-tail_kd"' in page and 'id="method-crispedit"' in page
    assert "<td><code>unedited</code></td>" in page and "<td><code>mine</code></td>" in page
    own = {
        sentence
        for name, title in (("tail_kd", "TAD"), ("crispedit", "CrispEdit"))
        for sentence in (
            f"Write the ledger of {name} alone",
            f"{title}'s comparison is complete: see results/test/ledger/{name}.csv (html beside it)",
        )
    }
    found = project.planned("all", "tail_kd", "crispedit", "distill", "edit")
    assert found <= {"Students are distilled", "Edits are made"} | own


def test_the_ledger_of_one_method_holds_its_claims_alone(project):
    done = project.snakemake("tail_kd")
    assert done.returncode == 0, done.stderr[-2000:]
    with open(project.results / "ledger/tail_kd.csv") as stream:
        rows = list(csv.DictReader(stream))
    with open(project.results / "claims.csv") as stream:
        expected = [row for row in csv.DictReader(stream) if row["method"] == "tail_kd"]
    assert rows == expected and len(rows) > 3


def test_the_ledger_measures_what_the_tier_has_and_says_what_it_lacks(project):
    with open(project.results / "claims.csv") as stream:
        rows = {(row["method"], row["claim"]): row for row in csv.DictReader(stream)}
    assert rows["tail_kd", "forward_kl"]["n"] == "2" and rows["tail_kd", "cost"]["n"] == "3"
    assert rows["tail_kd", "supervised"]["n"] == "8" and rows["crispedit", "edit_success"]["n"] == "4"
    assert (
        rows["crispedit", "over_lora"]["verdict"] == "not testable here"
        and "world_lora" in rows["crispedit", "over_lora"]["reason"]
    )
    # a handful of steps writes nothing in, so what is kept beside it says nothing
    moot = rows["crispedit", "drift_half_of_ft"]
    assert moot["verdict"] == "not testable here" and "not written in" in moot["reason"]


def test_an_edited_model_is_what_evaluation_reads(project):
    edited = project.results / "edit/crispedit/mine/seed0/manifest.json"
    for method in ("reasoning", "retention"):
        read = manifest.read(project.results / f"evaluate/{method}/crispedit-mine/seed0/manifest.json", verify=False)
        assert read.inputs["model"] == manifest.sha256(edited)


def test_a_users_edits_by_target_and_by_the_modules_own_command_line_are_one(project):
    """The first line of the rule's log, with the user's file in place of the manifest, gives the same model and scorecard."""
    made = project.results / "edit/crispedit/mine/seed0"
    score = tables.read(made / "edits.parquet")
    assert [row["target"] for row in score] == ["a3", "b5"] and score[1]["paraphrase"] is None
    words = {
        "--model": "results/test/base/scratch/two_style/seed0/manifest.json",
        "--edits": "mine.jsonl",
        "--capability": "results/test/data/corpus/digits/seed0/manifest.json",
        "--factors": "results/test/edit/factors/mine/seed0/manifest.json",
        "--output": "out/edit/crispedit/mine/seed0/manifest.json",
    }
    keys = "learning_rate: 0.01, batch: 4, epochs: 4, leading_space: false, refresh: null, texts: 8, tokens: 32, drift_texts: 4, drift_tokens: 32, max_new_tokens: 4"
    for pair in keys.split(", "):
        name, value = pair.split(": ")
        words[f"--{name.replace('_', '-')}"] = value
    done = project.call("-m", "posttrain.edit.crispedit", *(word for pair in words.items() for word in pair))
    assert done.returncode == 0, done.stdout + done.stderr
    own = project.folder / "out/edit/crispedit/mine/seed0"
    for file in ("model/model.safetensors", "edits.parquet", "drift.parquet"):
        assert manifest.sha256(own / file) == manifest.sha256(made / file)


def test_changed_edits_of_a_user_rerun_what_rests_on_them_alone(project):
    with project.edited("mine.jsonl", '"target": "b5"', '"target": "b6"'):
        planned = project.planned("all")
    assert "Make edits: mine (seed 0)" in planned and "Edit mine (seed 0)" in planned
    assert not any("world" in message or "Distil" in message for message in planned)


def test_a_users_bad_row_stops_its_own_job_with_one_sentence(project):
    target = str(project.results.relative_to(project.folder) / "edit/crispedit/mine/seed0/manifest.json")
    with project.edited("mine.jsonl", '"subject": "34"', '"subject": "99"'):
        done = project.snakemake(target)
    assert done.returncode != 0
    sentence = "edits.jsonl:2: the subject '99' does not stand in the prompt '34='; correct one of them."
    assert sentence in done.stdout + done.stderr
    again = project.snakemake(target)  # with the file back
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
