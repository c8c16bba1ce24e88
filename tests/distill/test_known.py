"""Known sources: exact metrics against SciPy and loops, independent stacked models, paired arms, rates chosen elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.distill import grid, known, metrics, source, stacked
from posttrain.distill.formulas import Divergence

V = 16


@pytest.fixture(scope="module")
def markov(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("markov") / "results/test/distill/source/markov/seed0/manifest.json"
    output.parent.mkdir(parents=True)
    source.main(source.Config(output=output, vocabulary=V, factors=3, count=3))
    return output


def job(markov: Path, folder: Path, name: str = "kd", kind=known.Config, **options):
    method = "grid" if kind is grid.Config else "known"
    output = folder / "distill" / method / name / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    defaults = {"replicates": 2, "width": 8, "heads": 2, "length": 6, "steps": 5, "batch_size": 4, "held_out": 8, "head": 4}
    return kind(output=output, source=markov, **(defaults | options))


def test_metrics_are_those_of_their_definitions():
    from scipy.stats import spearmanr

    t, s = (2 * torch.randn(9, V, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    k = 4
    found, masses = metrics.compare(t, s, k)
    for i in range(9):
        p, q = t[i].double().softmax(-1), s[i].double().softmax(-1)
        order = sorted(range(V), key=lambda v: -p[v])
        head, tail = order[:k], order[k:]
        a, b = sum(float(p[v]) for v in tail), sum(float(q[v]) for v in tail)
        kl1 = sum(float(p[v] * (p[v] / q[v]).log()) for v in head) + a * math.log(a / b)
        kl2 = sum(float(p[v] / a * (p[v] / a / (q[v] / b)).log()) for v in tail)
        wanted = {"kl1": kl1, "kl2": kl2, "kl": kl1 + a * kl2, "alpha_t": a, "alpha_s": b, "alpha_gap": abs(a - b)}
        wanted["spearman"] = spearmanr([float(p[v]) for v in tail], [float(q[v]) for v in tail]).statistic
        wanted["top1"] = float(p.argmax() == q.argmax())
        wanted["entropy_t"] = -float((p * p.log()).sum())
        assert {n: float(found[n][i]) for n in metrics.NAMES} == pytest.approx(wanted, abs=1e-11)
        assert masses[i, 1].tolist() == pytest.approx([float(p[order[1]]), float(q[order[1]])], abs=1e-12)
    assert metrics.buckets(V) == [(0, 1), (1, 2), (2, 5), (5, 10), (10, 16)]
    assert torch.allclose(masses.sum(1), torch.ones(9, 2, dtype=torch.float64))


def test_full_calibration_by_hand():
    """Two positions over three tokens: three pairs in the first bin, one in each of three others."""
    p = torch.tensor([[0.95, 0.03, 0.02], [0.02, 0.13, 0.85]])
    y = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    sums = metrics.calibration(p, y)
    assert sums[:, 0].tolist() == [3, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert metrics.full_ece(sums, 2) == pytest.approx((0.07 + 0.87 + 0.85 + 0.05) / 2, abs=1e-7)
    assert metrics.full_ece(metrics.calibration(p, p), 2) == 0


def test_a_source_is_what_its_formula_says(markov):
    found = source.read(markov)
    assert found.shape == (3, V, V) and not torch.equal(found[0], found[1])
    one = source.Config(output=markov, vocabulary=V, factors=3, scale=0.0)
    ranks = (-source.logits(one, 0)).exp()
    assert torch.allclose(ranks, ranks[:1].expand(V, V)) and sorted(ranks[0].round().int().tolist()) == list(range(1, V + 1))
    context = found[0] - source.logits(one, 0)  # what scale 0.9 adds is of rank 3
    assert torch.linalg.matrix_rank(context.double(), atol=1e-3) == 3
    drawn = source.draw(found[0], 4000, 8, 5)
    assert torch.equal(drawn, source.draw(found[0], 4000, 8, 5)) and drawn.shape == (4000, 9)
    token = int(drawn[:, :-1].mode().values.mode().values)
    after = drawn[:, 1:][drawn[:, :-1] == token]
    seen = torch.bincount(after, minlength=V) / len(after)
    p = found[0, token].softmax(-1)
    assert (seen - p).abs().max() < 4 * float((p * (1 - p)).sqrt().max()) / math.sqrt(len(after))


def test_stacked_models_are_independent_and_causal():
    weights = stacked.initial(V, 6, 8, 2, [3, 4])
    tokens = torch.randint(V, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    both = stacked.forward(weights, tokens, 2)
    for m, seed in enumerate((3, 4)):
        alone = stacked.forward(stacked.initial(V, 6, 8, 2, [seed]), tokens[m : m + 1], 2)
        assert torch.allclose(alone[0], both[m], atol=1e-6)
    assert not torch.allclose(both[0], both[1], atol=1e-2)
    other = tokens.clone()
    other[..., 4] = (other[..., 4] + 1) % V
    changed = (stacked.forward(weights, other, 2) - both).abs().amax((0, 1, 3))
    assert changed[:4].max() < 1e-6 and changed[4:].min() > 1e-4


def test_adam_is_torchs_with_a_rate_of_each_model():
    weights = stacked.initial(V, 6, 8, 1, [1, 2])
    rates = [1e-3, 1e-2]
    tokens = torch.randint(V, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    alone = [{n: v[m : m + 1].detach().clone().requires_grad_() for n, v in weights.items()} for m in range(2)]
    theirs = [torch.optim.Adam(one.values(), lr=rate) for one, rate in zip(alone, rates, strict=True)]
    ours = stacked.Adam(weights, rates)
    for _ in range(3):
        stacked.forward(weights, tokens, 2).logsumexp(-1).sum().backward()
        norms = ours.step()
        for m, optimizer in enumerate(theirs):
            stacked.forward(alone[m], tokens[m : m + 1], 2).logsumexp(-1).sum().backward()
            norm = sum(float(p.grad.square().sum()) for p in alone[m].values()) ** 0.5
            assert float(norms[m]) == pytest.approx(norm, rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
    for m in range(2):
        assert all(torch.allclose(alone[m][n][0], weights[n][m], atol=2e-5) for n in weights)


def test_objective_of_a_model_is_its_mean_per_token(markov, tmp_path):
    config = job(markov, tmp_path, weight=3.0, ce_weight=0.5)
    t, s = (torch.randn(2, 3, 6, V, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    following = torch.randint(V, (2, 3, 6), generator=torch.Generator().manual_seed(3))
    kl = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    ce = -s.log_softmax(-1).gather(-1, following[..., None])[..., 0]
    wanted = (3 * kl + 0.5 * ce).mean((1, 2)).sum()
    assert float(known.objective(config, Divergence(kind="kl"), t, s, following)) == pytest.approx(float(wanted), rel=1e-5)


def test_job(markov, tmp_path):
    """Tables, both rates, the same bytes again; a rate is chosen by forward KL on a source that no replicate has."""
    one = job(markov, tmp_path, divergence=Divergence(k=4), rates=[1e-4, 3e-2], common_rate=2e-3)
    known.main(one)
    rows = tables.read(one.folder / "replicates.parquet")
    assert [(row["rate"], row["replicate"]) for row in rows] == [("own", 0), ("own", 1), ("common", 0), ("common", 1)]
    assert {row["learning_rate"] for row in rows if row["rate"] == "own"} == {3e-2}
    assert set(known.COLUMNS) | {"arm", "replicate", "rate", "learning_rate"} == set(rows[0])
    for row in rows:
        assert row["arm"] == "kd" and row["kl"] > 0 and row["ce"] == pytest.approx(row["kl"] + row["entropy_t"], abs=1e-9)
    assert rows[0]["kl"] < rows[2]["kl"]  # five steps at 0.03 do more than at 0.002
    buckets = tables.read(one.folder / "buckets.parquet")
    for rate in ("own", "common"):
        for side in ("teacher", "student"):
            total = sum(b[side] for b in buckets if (b["rate"], b["replicate"]) == (rate, 1))
            assert total == pytest.approx(1, abs=1e-6)
    tried = tables.read(one.folder / "rates.parquet")
    weights, _ = known.train(one, one.divergence, source.read(markov), [(2, 3e-2)])
    (again,) = known.judge(one, weights, source.read(markov), [(2, 3e-2)], "validation")
    assert tried[1]["kl"] == pytest.approx(again["kl"], rel=1e-4) and tried[1]["kl"] < tried[0]["kl"]
    found = manifest.read(one.output).metrics
    assert found["kl/own"].n == 2 and found["learning_rate"].value == 3e-2 and found["parameters"].value > 0
    other = job(markov, tmp_path / "again", divergence=Divergence(k=4), rates=[1e-4, 3e-2], common_rate=2e-3)
    known.main(other)
    assert other.output.read_bytes() == one.output.read_bytes()


def test_one_rate_that_is_the_common_one_is_trained_once(markov, tmp_path, monkeypatch):
    calls, plain = [], known.train
    monkeypatch.setattr(known, "train", lambda *args: calls.append(args[-1]) or plain(*args))
    one = job(markov, tmp_path, divergence=Divergence(kind="none"), rates=[2e-3])
    known.main(one)
    assert calls == [[(0, 2e-3), (1, 2e-3)]]
    rows = tables.read(one.folder / "replicates.parquet")
    assert [row["rate"] for row in rows] == ["own", "own", "common", "common"] and rows[0]["kl"] == rows[2]["kl"]


def test_grid_has_the_arms_of_the_study(markov, tmp_path):
    one = job(markov, tmp_path, "kxb", grid.Config, heads_k=[1, 4], betas=[2.0])
    grid.main(one)
    rows = tables.read(one.folder / "grid.parquet")
    assert [(r["kind"], r["k"], r["beta"]) for r in rows[::2]] == [("tad", 1, 2.0), ("tad", 4, 2.0), ("kl", 0, 0.0)]
    arm = job(markov, tmp_path, "tad", divergence=Divergence(k=4, beta=2.0), rates=[2e-3])
    known.main(arm)
    same = tables.read(arm.folder / "replicates.parquet")
    assert [row["kl"] for row in rows[2:4]] == [row["kl"] for row in same[:2]]
    assert manifest.read(one.output).metrics["best_k"].value in (1, 4)


def test_mistakes_are_one_sentence(markov, tmp_path):
    with pytest.raises(UserError, match=r"has 3 sources for 3 replicates and one for choosing rates; raise its count to 4\.$"):
        known.main(job(markov, tmp_path, replicates=3))
    with pytest.raises(UserError, match=r"^head = 15 leaves no tail of 16 tokens; lower it\.$"):
        known.main(job(markov, tmp_path, head=15))
    with pytest.raises(UserError, match=r"^replicate 0 at learning rate 1e\+30 diverged"):
        known.main(job(markov, tmp_path, rates=[1e30]))
