"""Verdicts and rows of the ledger, on numbers that are known."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.core.stats import Interval
from posttrain.report import claims
from posttrain.report.ledger import COLUMNS, VERDICTS, judge, judge_bound, judge_reversal, read_claims

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0.20, 0.10, 0.30), "replicated"),
        ((0.06, 0.01, 0.11), "replicated"),
        ((0.03, 0.01, 0.06), "inconclusive"),  # above zero, but the estimate is below what counts
        ((0.01, -0.02, 0.04), "contradicted"),  # a tight null: 0.05 is excluded
        ((0.03, -0.05, 0.11), "inconclusive"),
        ((0.06, -0.02, 0.14), "inconclusive"),  # the estimate counts, the interval holds 0
        ((0.03, 0.01, 0.045), "inconclusive"),  # surely positive: "contradicted" would deny the sign
        ((-0.20, -0.30, -0.10), "contradicted"),
        ((0.0, 0.0, 0.0), "contradicted"),
    ],
)
def test_verdict(interval, expected):
    found = judge(Interval(*interval), 0.05, seeds=1)
    assert found.verdict == expected and found.verdict in VERDICTS
    assert "one seed" in found.reason and "3 seeds" in judge(Interval(*interval), 0.05, seeds=3).reason


def test_no_verdict_where_the_baseline_leaves_no_room():
    found = judge(Interval(0.03, 0.01, 0.045), 0.05, seeds=3, baseline=0.957)
    assert found.verdict == "not testable here" and "0.957" in found.reason
    assert judge(Interval(0.03, -0.01, 0.045), 0.05, seeds=3, baseline=0.94).verdict == "contradicted"


def test_a_reversal_is_never_contradicted():
    def verdict(*interval, ordered=True):
        return judge_reversal(Interval(*interval), 0.05, 3, "a scores better, b starts better", ordered=ordered).verdict

    assert verdict(0.2, 0.1, 0.3) == "replicated"
    assert verdict(0.2, 0.1, 0.3, ordered=False) == verdict(0.2, -0.1, 0.5) == verdict(0.04, 0.01, 0.07) == "inconclusive"
    assert verdict(-0.3, -0.4, -0.2) == "inconclusive"
    agree = judge_reversal(Interval(-0.3, -0.4, -0.2), 0.05, 3, "a scores better, b starts better", ordered=True)
    assert "starts better" not in agree.reason and "no pair of these arms is reversed" in agree.reason


def test_verdict_on_a_bound():
    assert judge_bound(Interval(1.01, 0.99, 1.04), 1.05, "batches").verdict == "replicated"
    assert judge_bound(Interval(1.10, 1.06, 1.20), 1.05, "batches").verdict == "contradicted"
    assert judge_bound(Interval(1.04, 1.00, 1.08), 1.05, "batches").verdict == "inconclusive"


def test_shipped_claims_are_complete():
    found = read_claims(ROOT / "configs/claims.yaml")
    assert {"difference", "reversal", "overhead", "not_testable"} == {claim.kind for claim in found["pear"].values()}
    assert all(claim.source and claim.paper_value for claim in found["pear"].values())


def test_a_claim_without_its_arms_is_refused(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text("pear:\n  x: {statement: s, paper_value: p, source: q, kind: difference, task: t, arm: a, scope: z}\n")
    with pytest.raises(UserError, match=r"pear\.x.*kind: difference needs baseline; add it"):
        read_claims(path)


ARMS = ("sft", "good", "better")
SKILL = {"rl_sft": 4, "rl_good": 8, "rl_better": 12, "sft_sft": 12, "sft_good": 8, "sft_better": 4}


@pytest.fixture
def results(tmp_path) -> Path:
    """Three seeds; after RL the order of the arms is the reverse of the SFT order, on both scores."""
    from posttrain.data.tokenizer import Config

    root, rng = tmp_path / "results/t", np.random.default_rng(0)

    def publish(reference, seed, rows, name):
        path = root / reference / f"seed{seed}" / manifest.NAME
        path.parent.mkdir(parents=True)
        manifest.publish(
            Config(output=path, seed=seed, kind="characters", alphabet="a"), {}, [tables.write(rows, path.parent / name)]
        )

    for seed in (0, 1, 2):
        for checkpoint, skill in SKILL.items():
            rows = [{"id": str(i), "n": 16, "correct": int(np.clip(skill + rng.integers(-2, 3), 0, 16))} for i in range(80)]
            publish(f"evaluate/reasoning/task-{checkpoint}", seed, rows, "items.parquet")
        for checkpoint, skill in {"sft_sft": 8, "sft_good": 4, "rl_sft": 12, "rl_good": 6}.items():  # the same order twice
            rows = [{"id": str(i), "n": 16, "correct": int(skill + rng.integers(-2, 3))} for i in range(80)]
            publish(f"evaluate/reasoning/flat-{checkpoint}", seed, rows, "items.parquet")
        # After RL the order is sure; before it `sft` is ahead in one seed, behind in another.
        for checkpoint, skill in {"sft_sft": (10, 7, 8)[seed], "sft_good": 8, "rl_sft": 4, "rl_good": 12}.items():
            rows = [{"id": str(i), "n": 16, "correct": int(skill + rng.integers(-2, 3))} for i in range(80)]
            publish(f"evaluate/reasoning/noisy-{checkpoint}", seed, rows, "items.parquet")
        for i, arm in enumerate(ARMS):
            publish(
                f"sft/train/task-{arm}", seed, [{"nll": 1.0 + i + rng.normal(0, 0.1)} for _ in range(60)], "validation.parquet"
            )
        times = [{"sft": 1.0 + rng.normal(0, 0.01), "pear_token": 1.02 + rng.normal(0, 0.01)} for _ in range(50)]
        publish("sft/overhead/task", seed, times, "step_times.parquet")
    (tmp_path / "claims.yaml").write_text("""
m:
  gain: {statement: s, paper_value: p, source: q, kind: difference, task: task, arm: rl_better, baseline: rl_sft, smallest_effect: 0.05, scope: z}
  loss: {statement: s, paper_value: p, source: q, kind: difference, task: task, arm: rl_sft, baseline: rl_better, smallest_effect: 0.05, scope: z}
  rank: {statement: s, paper_value: p, source: q, kind: reversal, task: task, score: accuracy, arms: [sft, good, better], smallest_effect: 0.05, scope: z}
  nll: {statement: s, paper_value: p, source: q, kind: reversal, task: task, score: likelihood, arms: [sft, good, better], smallest_effect: 0.05, scope: z}
  same: {statement: s, paper_value: p, source: q, kind: reversal, task: flat, score: accuracy, arms: [sft, good], smallest_effect: 0.05, scope: z}
  noisy: {statement: s, paper_value: p, source: q, kind: reversal, task: noisy, score: accuracy, arms: [sft, good], smallest_effect: 0.05, scope: z}
  cost: {statement: s, paper_value: p, source: q, kind: overhead, task: task, arm: pear_token, baseline: sft, bound: 1.05, scope: z}
  other: {statement: s, paper_value: p, source: q, kind: difference, task: elsewhere, arm: rl_a, baseline: rl_b, scope: z}
  big: {statement: s, paper_value: p, source: q, kind: not_testable, scope: needs a cluster}
""")
    return root


def ledger(results, seeds=(0, 1, 2)) -> dict[str, dict[str, str]]:
    job = claims.Config(
        output=results / "claims.csv",
        root=results,
        seeds=seeds,
        arms=ARMS,
        claims=results.parents[1] / "claims.yaml",
        resamples=500,
    )
    claims.main(job)
    with open(job.output) as stream:
        reader = csv.DictReader(stream)
        rows = {row["claim"]: row for row in reader}
        assert tuple(reader.fieldnames) == COLUMNS
    return rows


def test_rows(results):
    found = ledger(results)
    assert float(found["gain"]["estimate"]) == pytest.approx(0.5, abs=0.03) and found["gain"]["verdict"] == "replicated"
    assert (
        float(found["loss"]["estimate"]) == pytest.approx(-float(found["gain"]["estimate"]))
        and found["loss"]["verdict"] == "contradicted"
    )
    assert float(found["gain"]["ci_low"]) < float(found["gain"]["estimate"]) < float(found["gain"]["ci_high"])
    assert found["gain"]["n"] == "240" and found["gain"]["seeds"] == "3"
    for name in ("rank", "nll"):  # sft has the best score of both kinds and is the worst start
        assert found[name]["verdict"] == "replicated" and "sft scores better, better starts better" in found[name]["reason"]
        assert float(found[name]["estimate"]) == pytest.approx(0.5, abs=0.03)
    assert found["nll"]["n"] == "240"  # all test items, though there are fewer validation traces
    assert found["same"]["verdict"] == "inconclusive" and float(found["same"]["estimate"]) < 0
    assert float(found["noisy"]["ci_low"]) > 0.05 and found["noisy"]["verdict"] == "inconclusive"
    assert "the difference in SFT score is within it" in found["noisy"]["reason"]
    assert float(found["cost"]["estimate"]) == pytest.approx(1.02, abs=0.01) and found["cost"]["verdict"] == "replicated"
    assert found["other"]["verdict"] == "not testable here" and "no evaluate/reasoning/elsewhere-rl_a" in found["other"]["reason"]
    assert found["big"]["reason"] == "needs a cluster" and found["big"]["estimate"] == ""


def test_one_seed_says_so_and_the_ledger_is_reproducible(results):
    first = ledger(results, seeds=(0,))
    text = (results / "claims.csv").read_bytes()
    assert "one seed" in first["gain"]["reason"] and first["gain"]["seeds"] == "1"
    assert ledger(results, seeds=(0,)) == first and (results / "claims.csv").read_bytes() == text
    assert "<script" not in (results / "claims.html").read_text()


def rewrite(where: Path, change) -> None:
    """Change the rows of items.parquet and let the manifest agree with them again."""
    import json

    rows = change(tables.read(where / "items.parquet"))
    file = tables.write(rows, where / "items.parquet")
    found = json.loads((where / "manifest.json").read_text())
    found["artifacts"]["items.parquet"] = {"sha256": manifest.sha256(file), "size": file.stat().st_size}
    (where / "manifest.json").write_text(json.dumps(found))


def test_items_are_paired_by_id_not_by_position(results):
    """With one seed the interval depends on the pairing (over seeds only the means count)."""
    before = ledger(results, seeds=(0,))["gain"]
    rewrite(results / "evaluate/reasoning/task-rl_better/seed0", lambda rows: rows[::-1])
    rewrite(results / "evaluate/reasoning/task-rl_sft/seed0", lambda rows: rows[5:] + rows[:5])
    after = ledger(results, seeds=(0,))["gain"]
    exact = [
        {row["id"]: row["correct"] / 16 for row in tables.read(results / f"evaluate/reasoning/task-{name}/seed0/items.parquet")}
        for name in ("rl_better", "rl_sft")
    ]
    spread = np.std([exact[0][i] - exact[1][i] for i in exact[0]]) * 1.96 / np.sqrt(80)
    for row in (before, after):
        assert float(row["ci_high"]) - float(row["estimate"]) == pytest.approx(spread, rel=0.15)


def test_pairing_lowers_the_width_that_it_should(results):
    """Arms that rise and fall together item by item: the paired interval is far narrower than an unpaired one."""
    for name, shift in (("rl_better", 2), ("rl_sft", 0)):
        where = results / f"evaluate/reasoning/task-{name}/seed0"
        rewrite(where, lambda rows, shift=shift: [{**row, "correct": int(row["id"]) % 13 + shift} for row in rows])
    rewrite(results / "evaluate/reasoning/task-rl_sft/seed0", lambda rows: rows[7:] + rows[:7])
    found = ledger(results, seeds=(0,))["gain"]
    assert float(found["ci_low"]) == float(found["ci_high"]) == pytest.approx(2 / 16)


def test_reversal_is_corrected_for_the_number_of_pairs(results):
    """Among three arms there are three pairs, so the interval is the one at 1 - 0.05 / 3."""
    from posttrain.core.stats import bootstrap

    found = ledger(results)["rank"]
    values = [
        claims.paired(claims.Results(results), "task", ["rl_better", "rl_sft"], seed, "pass@1") @ np.array([1.0, -1.0])
        for seed in (0, 1, 2)
    ]
    corrected, plain = (bootstrap(values, resamples=500, confidence=c) for c in (1 - 0.05 / 3, 0.95))
    width = float(found["ci_high"]) - float(found["ci_low"])
    assert width == pytest.approx(corrected.high - corrected.low, rel=0.02) and width > 1.2 * (plain.high - plain.low)


def test_arms_on_different_items_are_refused(results):
    rewrite(results / "evaluate/reasoning/task-rl_sft/seed0", lambda rows: [{**rows[0], "id": "other"}, *rows[1:]])
    with pytest.raises(UserError, match="rl_sft and rl_better of task were evaluated on different items"):
        ledger(results)


def test_a_damaged_table_is_refused(results):
    where = results / "evaluate/reasoning/task-rl_sft/seed0"
    tables.write(tables.read(where / "items.parquet")[:-1], where / "items.parquet")
    with pytest.raises(UserError, match="differs from what"):
        ledger(results)
