"""Every kind of claim on results whose numbers follow by hand: estimate, interval, n, seeds, verdict and its sentence."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from posttrain.core import config as configs
from posttrain.core.effects import main_effects
from posttrain.core.errors import UserError
from posttrain.core.stats import Interval, bootstrap
from posttrain.report import claims
from posttrain.report.ledger import Claim, judge_bound, over, read_claims
from tests.results import publish

STATED = {"statement": "s", "paper_value": "p", "source": "q", "scope": "small world"}
T2 = 4.302652729911275  # Student's t, two degrees of freedom, 97.5%
SEEDS = (0, 1, 2)


def measured(root: Path, seeds=SEEDS, **values):
    """The ledger's row of one claim."""
    claim = configs.validate(Claim, STATED | values, "claims.yaml: m.x")
    job = claims.Config(output=root / "claims.csv", root=root, seeds=seeds, arms=("a",), resamples=400)
    return claims.measure("x", "m", claim, claims.Results(root), job)


def one_sentence(error: pytest.ExceptionInfo) -> bool:
    return "\n" not in str(error.value)


def items(root: Path, checkpoint: str, seed: int, correct, *, ungated=None, n: int = 4, family=lambda i: "math", task="t"):
    rows = [
        {"id": str(i), "family": family(i), "n": n, "correct": int(c), "correct_ungated": int((ungated or correct)[i])}
        for i, c in enumerate(correct)
    ]
    publish(root, f"evaluate/reasoning/{task}-{checkpoint}", seed, {"items.parquet": rows})


# --- difference and at_most -------------------------------------------------------------------------------------


def test_a_difference_within_a_family_is_of_its_items_alone(tmp_path):
    def family(i):
        return "math" if i < 4 else "code"

    items(tmp_path, "new", 0, [4, 3, 4, 3, 0, 0], family=family)
    items(tmp_path, "old", 0, [1, 0, 1, 0, 4, 4], family=family)
    ask = {"kind": "difference", "task": "t", "arm": "new", "baseline": "old", "smallest_effect": 0.05, "seeds": (0,)}
    found = measured(tmp_path, family="math", **ask)
    assert (found["estimate"], found["ci_low"], found["ci_high"]) == (0.75, 0.75, 0.75)
    assert (found["n"], found["seeds"], found["verdict"]) == (4, 1, "replicated")
    assert measured(tmp_path, family="code", **ask)["estimate"] == -1 and measured(tmp_path, **ask)["n"] == 6
    with pytest.raises(UserError, match=r"evaluate/reasoning/t-new has no item of the family 'maths'") as caught:
        measured(tmp_path, family="maths", **ask)
    assert one_sentence(caught)


def test_several_arms_on_a_side_are_the_main_effects_of_the_two_by_two(tmp_path):
    """[d, c] against [b, a] per item is the main effect of the rows; d against a... of both factors is their difference."""
    rng, cells = np.random.default_rng(0), []
    for seed in SEEDS:
        table = {m: {r: rng.integers(0, 5, 12) for r in ("x", "y")} for m in ("low", "high")}
        for m, r in itertools.product(table, ("x", "y")):
            items(tmp_path, f"{m}_{r}", seed, table[m][r])
        cells.append(main_effects({m: {r: v / 4 for r, v in row.items()} for m, row in table.items()}))
    sides = {
        "mid": (["high_x", "high_y"], ["low_x", "low_y"]),
        "rl": (["low_y", "high_y"], ["low_x", "high_x"]),
    }
    for name, (arm, baseline) in sides.items():
        for seeds in (SEEDS, (0,)):
            per_item = [getattr(cells[s], name) for s in seeds]
            found = measured(tmp_path, seeds, kind="difference", task="t", arm=arm, baseline=baseline)
            expected = bootstrap(per_item, resamples=400)
            assert found["estimate"] == pytest.approx(np.mean([v.mean() for v in per_item]))
            assert (found["ci_low"], found["ci_high"]) == pytest.approx((max(expected.low, -1), min(expected.high, 1)))
            assert found["n"] == 12 * len(seeds)
    between = measured(tmp_path, kind="difference", task="t", arm="high_x", baseline="low_y")
    assert between["estimate"] == pytest.approx(np.mean([(one.mid - one.rl).mean() for one in cells]))


def test_metrics_of_reasoning(tmp_path):
    """pass@2 of c right among 4: 1 - C(4-c, 2) / C(4, 2), so 0, 1/2, 5/6, 1, 1 for c = 0 ... 4."""
    items(tmp_path, "new", 0, [1, 2, 1, 2], ungated=[4, 4, 3, 3])
    items(tmp_path, "old", 0, [0, 0, 0, 0], ungated=[2, 2, 2, 2])
    ask = {"kind": "difference", "task": "t", "arm": "new", "baseline": "old", "seeds": (0,)}
    assert measured(tmp_path, metric="pass@1", **ask)["estimate"] == pytest.approx(3 / 8)
    assert measured(tmp_path, metric="pass@2", **ask)["estimate"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert measured(tmp_path, metric="ungated", **ask)["estimate"] == pytest.approx(3 / 8)
    for metric, sentence in (
        ("pass@8", r"pass@8 needs at least 8 samples per item, there are 4"),
        ("pass@x", r"metric 'pass@x' is not pass@k, ungated, loss or fact_recall"),
        ("accuracy", r"metric 'accuracy' is not pass@k"),
    ):
        with pytest.raises(UserError, match=sentence) as caught:
            measured(tmp_path, metric=metric, **ask)
        assert one_sentence(caught)


def test_a_loss_has_no_ceiling_and_no_range(tmp_path):
    """Nats per token, by document; the differences of the seeds are 1, 2 and 6, so the interval reaches far beyond 1."""
    for seed, gap in zip(SEEDS, (1.0, 2.0, 6.0), strict=True):
        for name, loss in (("new", 3.0 + gap), ("old", 3.0)):
            rows = [{"id": str(i), "nll": (loss + i) * tokens, "tokens": tokens} for i, tokens in enumerate((5, 10, 40))]
            publish(tmp_path, f"evaluate/retention/t-{name}", seed, {"documents.parquet": rows})
    ask = {"task": "t", "arm": "new", "baseline": "old", "metric": "loss"}
    found = measured(tmp_path, kind="difference", smallest_effect=0.1, **ask)
    half = T2 * np.std([1, 2, 6], ddof=1) / np.sqrt(3)
    assert (found["estimate"], found["ci_low"], found["ci_high"]) == pytest.approx((3, 3 - half, 3 + half))
    assert found["n"] == 9 and found["verdict"] == "inconclusive"
    alone = measured(tmp_path, (2,), kind="difference", smallest_effect=0.1, **ask)
    assert alone["verdict"] == "replicated" and alone["estimate"] == pytest.approx(6)  # a baseline of 3 leaves room
    bound = measured(tmp_path, (0,), kind="at_most", bound=0.05, **ask)
    assert bound["verdict"] == "contradicted"
    assert bound["reason"] == "above 0.05 over documents of one seed; other seeds may differ. Small world."


def test_recall_of_facts_is_a_share(tmp_path):
    def facts(name, recalled):
        for seed in SEEDS:
            rows = [{"id": str(i), "hop": 1, "recalled": r} for i, r in enumerate(recalled(seed))]
            publish(tmp_path, f"evaluate/retention/t-{name}", seed, {"facts.parquet": rows})

    facts("kept", lambda s: [True, True, True, s > 0])
    facts("lost", lambda s: [True, False, False, False] if s < 2 else [False] * 4)
    ask = {"task": "t", "metric": "fact_recall", "smallest_effect": 0.1}
    found = measured(tmp_path, kind="difference", arm="kept", baseline="lost", **ask)
    half = T2 * np.std([0.5, 0.75, 1], ddof=1) / np.sqrt(3)
    assert 0.75 + half > 1 and found["ci_high"] == 1 and found["ci_low"] == pytest.approx(0.75 - half)
    full = measured(tmp_path, (1,), kind="difference", arm="lost", baseline="kept", **ask)
    assert full["verdict"] == "not testable here" and "leaves no room for 0.1" in full["reason"]


@pytest.mark.parametrize(
    ("gain", "two_sided", "verdict", "reason"),
    [
        (0, False, "replicated", "at most 0.05 over items and 3 seeds"),
        (-2, False, "replicated", "at most 0.05 over items and 3 seeds"),
        (2, False, "contradicted", "above 0.05 over items and 3 seeds"),
        (None, False, "inconclusive", "the interval holds 0.05, over items and 3 seeds"),
        (0, True, "replicated", "within ±0.05 over items and 3 seeds"),
        (-2, True, "contradicted", "beyond ±0.05 over items and 3 seeds"),
        (2, True, "contradicted", "beyond ±0.05 over items and 3 seeds"),
    ],
)
def test_an_effect_that_should_be_small(tmp_path, gain, two_sided, verdict, reason):
    for seed in SEEDS:
        items(tmp_path, "old", seed, [2, 2, 2, 2])
        items(tmp_path, "new", seed, [2 + gain] * 4 if gain is not None else [seed, 2, 2, 2 + seed])
    found = measured(tmp_path, kind="at_most", task="t", arm="new", baseline="old", bound=0.05, two_sided=two_sided)
    assert (found["verdict"], found["reason"]) == (verdict, f"{reason}. Small world.")


# --- scalar -----------------------------------------------------------------------------------------------------

LINEAGE = "evaluate/lineage/x"


def test_a_single_number_of_one_seed_decides_nothing(tmp_path):
    publish(tmp_path, LINEAGE, 0, metrics={"cosine/b:m,c": 0.25})
    found = measured(tmp_path, (0,), kind="scalar", reference=LINEAGE, metric="cosine/b:m,c", bound=0.1)
    assert (found["estimate"], found["ci_low"], found["ci_high"], found["n"], found["seeds"]) == (0.25, None, None, 1, 1)
    assert found["verdict"] == "inconclusive" and "one seed has no interval" in found["reason"]


@pytest.mark.parametrize(
    ("values", "bound", "side", "verdict"),
    [
        ((0.30, 0.31, 0.32), 0.2, "at_least", "replicated"),
        ((0.30, 0.31, 0.32), 0.2, "at_most", "contradicted"),
        ((0.30, 0.31, 0.32), 0.4, "at_most", "replicated"),
        ((0.30, 0.31, 0.32), 0.4, "at_least", "contradicted"),
        ((0.30, 0.31, 0.32), 0.3, "at_least", "inconclusive"),  # the estimate is above, the interval is not
        ((0.30, 0.31, 0.32), 0.32, "at_most", "inconclusive"),
    ],
)
def test_a_single_number_has_students_interval_over_seeds(tmp_path, values, bound, side, verdict):
    for seed, value in enumerate(values):
        publish(tmp_path, LINEAGE, seed, metrics={"cosine": value})
    found = measured(tmp_path, kind="scalar", reference=LINEAGE, metric="cosine", bound=bound, side=side)
    half = T2 * 0.01 / np.sqrt(3)
    assert (found["estimate"], found["ci_low"], found["ci_high"]) == pytest.approx((0.31, 0.31 - half, 0.31 + half))
    assert (found["n"], found["seeds"], found["verdict"]) == (3, 3, verdict) and "3 seeds. Small" in found["reason"]


def test_seeds_that_all_agree_have_no_width_and_the_reason_says_so(tmp_path):
    for seed in SEEDS:
        publish(tmp_path, LINEAGE, seed, metrics={"share": 1.0})
    found = measured(tmp_path, kind="scalar", reference=LINEAGE, metric="share", bound=1.0)
    assert found["verdict"] == "replicated" and found["ci_low"] == found["ci_high"] == 1
    assert found["reason"].startswith("at least 1 over 3 seeds, which all gave the same number.")


def test_a_metric_that_the_job_lacks_is_said_in_its_row_and_the_others_go_on(tmp_path):
    """It may be undefined (a model that did not move has no direction) or switched off in this tier."""
    for seed in SEEDS:
        publish(tmp_path, LINEAGE, seed, metrics={"cosine/b:m,c": 0.25, "l2/b>m": 1.0})
    found = measured(tmp_path, kind="scalar", reference=LINEAGE, metric="cosine/b:m,d", bound=0.5)
    assert found["verdict"] == "not testable here" and found["estimate"] is None
    assert found["reason"] == "evaluate/lineage/x has no metric 'cosine/b:m,d'; did you mean 'cosine/b:m,c'?"


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ([], None),
        ([{"reference": "a/b/one", "metric": "m", "at_most": 0.4}], None),  # the mean over seeds is 0.5
        ([{"reference": "a/b/one", "metric": "m", "at_most": 0.5}], "no room (m is 0.500)"),
        ([{"reference": "a/b/one", "metric": "m", "at_least": 0.6}], None),
        ([{"reference": "a/b/one", "metric": "m", "at_least": 0.6}, {"reference": "a/b/two", "metric": "m", "at_least": 0.2}], "no room (m is 0.200)"),
        ([{"reference": "a/b/one", "against": "a/b/two", "metric": "m", "at_least": 0.31}], None),
        ([{"reference": "a/b/two", "against": "a/b/one", "metric": "m", "at_most": -0.29}], "no room (difference in m is -0.300)"),
        ([{"reference": "a/b/three", "metric": "m", "at_most": 1.0}], "this tier has no a/b/three, which would say"),
    ],
)  # fmt: skip
def test_a_comparison_that_says_nothing_is_not_judged(tmp_path, conditions, reason):
    for seed, one in zip(SEEDS, (0.4, 0.5, 0.6), strict=True):
        publish(tmp_path, LINEAGE, seed, metrics={"x": 2.0})
        publish(tmp_path, "a/b/one", seed, metrics={"m": one})
        publish(tmp_path, "a/b/two", seed, metrics={"m": 0.2})
    conditions = [{**c, "because": "no room"} for c in conditions]
    found = measured(tmp_path, kind="scalar", reference=LINEAGE, metric="x", bound=1.0, moot_if=conditions)
    assert found["estimate"] == 2.0 and (found["verdict"] == "not testable here") == (reason is not None)
    assert reason is None or reason in found["reason"]


# --- rows -------------------------------------------------------------------------------------------------------

D3, OTHER = "midtrain/d3/chain_d3", "midtrain/d3/chain_random"
TABLE = {"kind": "rows", "reference": D3, "file": "replicates.parquet", "unit": "replicates"}


def replicates(root, reference, seed, values, order=None, **more):
    rows = [{"replicate": r, "world": "chain", "steps": float(v), **more} for r, v in enumerate(values)]
    publish(root, reference, seed, {"replicates.parquet": [rows[i] for i in order] if order else rows})


def test_the_mean_of_a_column(tmp_path):
    replicates(tmp_path, D3, 0, [10, 20, 30, 40], base=5.0)
    ask = {**TABLE, "arm": "steps", "bound": 0.0, "seeds": (0,)}
    alone, compared = measured(tmp_path, **ask), measured(tmp_path, baseline="base", **ask)
    expected = bootstrap([np.array([10.0, 20, 30, 40])], resamples=400)
    assert (alone["estimate"], alone["ci_low"], alone["ci_high"]) == pytest.approx(tuple(expected))
    assert (alone["n"], alone["seeds"], alone["verdict"]) == (4, 1, "replicated")
    assert alone["reason"] == "at least 0 over replicates of one seed; other seeds may differ. Small world."
    assert compared["estimate"] == 20 and compared["ci_low"] == pytest.approx(expected.low - 5)
    assert compared["reason"].startswith("above 0 over replicates")
    assert measured(tmp_path, **(ask | {"side": "at_most"}))["verdict"] == "contradicted"
    assert measured(tmp_path, **(ask | {"bound": 24}))["verdict"] == "inconclusive"


def test_several_seeds_of_rows_have_students_interval(tmp_path):
    for seed, shift in zip(SEEDS, (0, 1, 5), strict=True):
        replicates(tmp_path, D3, seed, [10 + shift, 12 + shift])
    found = measured(tmp_path, **TABLE, arm="steps", bound=3.0)
    half = T2 * np.std([0, 1, 5], ddof=1) / np.sqrt(3)
    assert (found["estimate"], found["ci_low"], found["ci_high"]) == pytest.approx((13, 13 - half, 13 + half))
    assert (found["n"], found["seeds"]) == (6, 3) and "over replicates and 3 seeds" in found["reason"]


def test_where_keeps_rows_of_both_jobs(tmp_path):
    for reference, gain in ((D3, 1.0), (OTHER, 0.0)):
        rows = [{"replicate": r, "window": w, "x": 10 * r + 100 * w + gain * (w + 1)} for r in range(3) for w in (0, 1)]
        publish(tmp_path, reference, 0, {"replicates.parquet": rows})
    ask = {**TABLE, "arm": "x", "bound": 0.0, "seeds": (0,)}
    found = measured(tmp_path, where={"window": 0}, **ask)
    assert found["estimate"] == pytest.approx(11) and found["n"] == 3
    assert measured(tmp_path, where={"window": 1}, against=OTHER, **ask)["estimate"] == pytest.approx(2)
    both = measured(tmp_path, against=OTHER, pair_by=("replicate", "window"), **ask)
    assert both["estimate"] == pytest.approx(1.5) and both["n"] == 6
    for values, sentence in (
        ({"where": {"window": 2}}, r"chain_d3: replicates.parquet has no row with {'window': 2}; correct the claim"),
        ({"where": {"windw": 1}}, r"chain_d3: replicates.parquet has no column 'windw'; did you mean 'window'\?$"),
        ({"against": OTHER}, r"chain_random: replicates.parquet has several rows for {'replicate': 0}; name more columns"),
    ):
        with pytest.raises(UserError, match=sentence) as caught:
            measured(tmp_path, **ask, **values)
        assert one_sentence(caught)


def test_rows_of_two_jobs_are_paired_by_name_not_by_place(tmp_path):
    """Paired, every difference is -3; by place they would be scattered."""
    replicates(tmp_path, D3, 0, [10, 50, 90, 130])
    replicates(tmp_path, OTHER, 0, [13, 53, 93, 133], order=[2, 0, 3, 1])
    ask = {**TABLE, "arm": "steps", "against": OTHER, "side": "at_most", "bound": 0.0, "seeds": (0,)}
    found = measured(tmp_path, **ask)
    assert found["estimate"] == found["ci_low"] == found["ci_high"] == -3
    assert found["verdict"] == "replicated" and found["reason"].startswith("below 0 over replicates of one seed")
    replicates(tmp_path, OTHER, 0, [13, 53, 93])
    with pytest.raises(UserError, match=r"chain_random: replicates.parquet has no row for {'replicate': 3}; rebuild both"):
        measured(tmp_path, **ask)


def test_a_baseline_of_another_job_is_a_column_of_its_rows(tmp_path):
    replicates(tmp_path, D3, 0, [10, 20])
    replicates(tmp_path, OTHER, 0, [1, 1], own=4.0)
    found = measured(tmp_path, (0,), **TABLE, arm="steps", baseline="own", against=OTHER, bound=0.0)
    assert found["estimate"] == 11


def test_no_difference_at_all_is_no_advantage(tmp_path):
    """Both never got there, so both count as the last step: neither is faster, however sure that is."""
    for reference in (D3, OTHER):
        replicates(tmp_path, reference, 0, [1000] * 4)
    ask = {**TABLE, "arm": "steps", "against": OTHER, "bound": 0.0, "seeds": (0,)}
    for side in ("at_most", "at_least"):
        found = measured(tmp_path, side=side, **ask)
        assert found["verdict"] == "inconclusive" and found["reason"].startswith("always 0, over replicates")
    assert measured(tmp_path, **TABLE, arm="steps", side="at_most", bound=1000, seeds=(0,))["verdict"] == "replicated"


def test_an_exact_result_lies_under_seed_0_and_counts_once(tmp_path):
    """Rows of one problem are one unit: three step sizes do not make three problems of it."""
    rows = [{"problem": p, "eta": eta, "regret": 0.1 * p + eta} for eta in (0.0, 0.01, 0.02) for p in range(4)]
    publish(tmp_path, "midtrain/testbed/u", 0, {"regrets.parquet": rows})
    ask = {"kind": "rows", "reference": "midtrain/testbed/u", "file": "regrets.parquet", "arm": "regret", "unit": "problems"}
    ask |= {"side": "at_most", "bound": 0.3, "seeded": False}
    found = measured(tmp_path, (4, 5, 6), independent_by=("problem",), **ask)
    expected = bootstrap([0.1 * np.arange(4) + 0.01], resamples=400)
    assert (found["estimate"], found["ci_low"], found["ci_high"]) == pytest.approx(tuple(expected))
    assert (found["n"], found["seeds"]) == (4, 1) and found["reason"].startswith("at most 0.3 over problems; no seed takes part.")
    each = measured(tmp_path, (4, 5, 6), **ask)
    assert each["n"] == 12 and each["estimate"] == pytest.approx(found["estimate"])
    assert each["ci_high"] - each["ci_low"] < 0.8 * (found["ci_high"] - found["ci_low"])
    missing = measured(tmp_path, (4,), **(ask | {"seeded": True}))
    assert missing["verdict"] == "not testable here"


def test_columns_that_hold_no_number_are_one_sentence(tmp_path):
    replicates(tmp_path, D3, 0, [1, 2], direction=None)
    for values, sentence in (
        ({"arm": "direction"}, r"replicates.parquet has None in column 'direction', not a number"),
        ({"arm": "world"}, r"replicates.parquet has 'chain' in column 'world', not a number"),
        ({"arm": "step"}, r"replicates.parquet has no column 'step'; did you mean 'steps'\?"),
        ({"arm": "steps", "baseline": "bse"}, r"replicates.parquet has no column 'bse'"),
        ({"arm": "steps", "against": D3, "pair_by": ["replica"]}, r"no column 'replica'; did you mean 'replicate'"),
    ):
        with pytest.raises(UserError, match=sentence) as caught:
            measured(tmp_path, (0,), **TABLE, bound=0.0, **values)
        assert one_sentence(caught)


# --- what is missing, what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"kind": "difference", "task": "t", "arm": "new", "baseline": ["old", "gone"]}, "evaluate/reasoning/t-gone"),
        (
            {"kind": "at_most", "task": "t", "arm": "new", "baseline": "old", "metric": "loss", "bound": 1},
            "evaluate/retention/t-new",
        ),
        ({"kind": "scalar", "reference": LINEAGE, "bound": 1}, LINEAGE),
        ({**TABLE, "arm": "steps", "bound": 1, "against": OTHER}, OTHER),
        ({"kind": "overhead", "task": "t", "arm": "a", "baseline": "b", "bound": 1.1}, "sft/overhead/t"),
        ({"kind": "reversal", "task": "t", "score": "accuracy", "arms": ["a", "b"]}, "evaluate/reasoning/t-sft_a"),
    ],
)
def test_a_claim_about_what_was_not_run_is_not_testable_here(tmp_path, values, missing):
    for seed in (0, 1):
        for name in ("new", "old"):
            items(tmp_path, name, seed, [1, 2])
        replicates(tmp_path, D3, seed, [1, 2])
    found = measured(tmp_path, (0, 1), **values)
    assert found["verdict"] == "not testable here" and found["reason"] == f"this tier has no {missing}"
    assert {found[name] for name in ("estimate", "ci_low", "ci_high", "n", "seeds")} == {None}


def test_every_seed_is_needed(tmp_path):
    replicates(tmp_path, D3, 0, [1, 2])
    assert measured(tmp_path, (0,), **TABLE, arm="steps", bound=1)["estimate"] == 1.5
    assert measured(tmp_path, (0, 1), **TABLE, arm="steps", bound=1)["verdict"] == "not testable here"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "at_most", "task": "t", "arm": "a", "baseline": "b"}, "kind: at_most needs bound; add it"),
        ({"kind": "at_most", "task": "t", "arm": "a", "bound": 0.1}, "kind: at_most needs baseline; add it"),
        ({"kind": "scalar", "bound": 1}, "kind: scalar needs reference; add it"),
        ({"kind": "scalar", "reference": LINEAGE}, "kind: scalar needs bound; add it"),
        ({"kind": "rows", "reference": D3, "arm": "x", "bound": 1}, "kind: rows needs file; add it"),
        ({"kind": "rows", "reference": D3, "file": "f", "bound": 1}, "kind: rows needs arm; add it"),
        ({"kind": "rows", "reference": D3, "file": "f", "arm": ["x", "y"], "bound": 1}, "arm: kind: rows takes one name"),
        ({"kind": "reversal", "task": "t", "score": "accuracy"}, "kind: reversal needs arms; add it"),
        (
            {"kind": "overhead", "task": "t", "arm": "a", "baseline": "b", "bound": 1.0},
            "bound = 1: an overhead is a ratio above 1",
        ),
        (
            {"kind": "overhead", "task": "t", "arm": "a", "baseline": "b", "bound": 0.5},
            "bound = 0.5: an overhead is a ratio above",
        ),
        ({"kind": "scalar", "reference": LINEAGE, "bound": 1, "two_sided": True}, "two_sided needs side: at_most"),
        (
            {"kind": "at_most", "task": "t", "arm": "a", "baseline": "b", "bound": 0.0, "two_sided": True},
            "bound = 0: nothing lies between",
        ),
        ({"kind": "difference", "task": "t", "arm": "a", "baseline": "b", "two_sided": True}, "two_sided is for the bound"),
        (
            {"kind": "difference", "task": "t", "arm": "a", "baseline": "b", "metric": "loss", "family": "math"},
            "family: loss is not measured per family; remove it",
        ),
        ({"kind": "ratio"}, "kind = 'ratio'"),
        ({"kind": "not_testable", "smallest_efect": 1}, "smallest_efect"),
        ({"kind": "difference", "task": "t", "arm": "a", "baseline": "b", "smallest_effect": -0.1}, "smallest_effect"),
    ],
)
def test_a_malformed_claim_is_one_sentence(tmp_path, values, sentence):
    path = tmp_path / "claims.yaml"
    path.write_text(configs.canonical({"m": {"x": STATED | values}}))
    with pytest.raises(UserError) as caught:
        read_claims(path)
    assert sentence in str(caught.value) and "m.x" in str(caught.value) and one_sentence(caught)


@pytest.mark.parametrize(
    ("interval", "options", "verdict"),
    [
        ((0.0, -0.1, 0.1), {"side": "at_most"}, "replicated"),  # the bound itself is at most the bound
        ((0.0, -0.1, 0.1), {"side": "at_most", "strict": True}, "inconclusive"),
        ((0.0, -0.1, 0.09), {"side": "at_most", "strict": True}, "replicated"),
        ((0.2, 0.1, 0.3), {"side": "at_least"}, "replicated"),
        ((0.2, 0.1, 0.3), {"side": "at_least", "strict": True}, "inconclusive"),
        ((0.2, 0.11, 0.3), {"side": "at_most"}, "contradicted"),
        ((0.2, 0.1, 0.3), {"side": "at_most"}, "inconclusive"),
        ((0.1, 0.1, 0.1), {"side": "at_least"}, "replicated"),
        ((0.1, 0.1, 0.1), {"side": "at_least", "strict": True}, "inconclusive"),
        ((0.0, -0.1, 0.1), {"two_sided": True}, "replicated"),
        ((0.0, -0.11, 0.1), {"two_sided": True}, "inconclusive"),
        ((0.0, -0.1, 0.11), {"two_sided": True}, "inconclusive"),
        ((-0.2, -0.3, -0.11), {"two_sided": True}, "contradicted"),
        ((0.2, 0.11, 0.3), {"two_sided": True}, "contradicted"),
    ],
)
def test_verdict_on_either_side_of_a_bound(interval, options, verdict):
    assert judge_bound(Interval(*interval), 0.1, "rows", **options).verdict == verdict


def test_an_inconclusive_size_names_the_end_that_the_interval_holds():
    assert "holds -0.1," in judge_bound(Interval(-0.1, -0.2, 0.0), 0.1, "rows", two_sided=True).reason
    assert "holds 0.1," in judge_bound(Interval(0.1, 0.0, 0.2), 0.1, "rows", two_sided=True).reason


def test_what_an_interval_is_over():
    assert over("facts", 1) == "facts of one seed; other seeds may differ" and over("facts", 3) == "facts and 3 seeds"
    assert over("problems", 0) == "problems; no seed takes part"
