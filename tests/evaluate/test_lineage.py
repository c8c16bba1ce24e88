"""The lineage job on tiny models, against independent arithmetic on their weights."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.core import manifest, models, tables
from posttrain.core.errors import UserError
from posttrain.core.generation import sample
from posttrain.data import chat, verify
from posttrain.evaluate import geometry, lineage
from tests.checkpoints import corpus, store, tiny

TEXTS = ["12345=a13605#5", "99=1", "0123456789" * 3, "5=b5#5", "31415=", "2=", "777", "4=a4#4"]
PIECES = ["12345=a1", "01234567", "89012345", "67890123"]  # of eight characters, the first of each text before any second


@pytest.fixture(scope="module")
def family(tmp_path_factory, world) -> SimpleNamespace:
    """base, mid (all weights moved), rl (one weight matrix moved a little from mid), mid_other; a corpus and a task."""
    root = tmp_path_factory.mktemp("lineage")
    base, tokenizer = tiny(seed=0)
    with torch.no_grad():
        for p in base.parameters():
            p.mul_(8 if p.ndim > 1 else 1)  # logits far from uniform, so that what is sampled depends on the weights
    found, generator = {"base": base}, torch.Generator().manual_seed(5)
    for name, start, scale in (("mid", "base", 0.5), ("mid_other", "base", 0.5), ("rl", "mid", 1e-3)):
        model, _ = tiny(seed=0)
        model.load_state_dict(found[start].state_dict())
        with torch.no_grad():
            for key, p in model.named_parameters():
                if name != "rl" or key == "model.layers.1.mlp.up_proj.weight":
                    p.mul_(1 + scale * torch.randn(p.shape, generator=generator))
        found[name] = model
    paths = {name: store(root / name, model, tokenizer) for name, model in found.items()}
    return SimpleNamespace(models=found, paths=paths, corpus=corpus(root, TEXTS), task=world.task, root=root)


def job(tmp_path, family, names=("base", "mid", "rl"), **more) -> lineage.Config:
    output = tmp_path / "evaluate" / "lineage" / "one" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    return lineage.Config(output=output, models={n: family.paths[n] for n in names}, **more)


def flat(model, keep=lambda name: True) -> np.ndarray:
    """All parameters, the tied embedding once, as one float64 vector."""
    return np.concatenate([p.detach().double().numpy().ravel() for n, p in model.named_parameters() if keep(n)])


@pytest.fixture(scope="module")
def done(family, tmp_path_factory):
    """One run of everything: metrics, card and the three tables."""
    one = job(
        tmp_path_factory.mktemp("done"),
        family,
        ("base", "mid", "rl", "mid_other"),
        directions=(("base", "mid", "mid_other"), ("base", "mid", "rl")),
        gaps=(("base", "mid", "rl", "mid_other"),),
        ratios=(("base", "mid_other", "mid", "rl"),),
        path=("base", "mid", "rl"),
        corpus=family.corpus,
        texts=4,
        tokens=8,
        text_batch=3,
        task=family.task,
        grid=3,
        path_points=5,
        items=4,
        samples=2,
        temperature=1.0,
        max_new_tokens=4,
    )
    lines = pytest.MonkeyPatch()
    lines.setattr(verify, "correct", lambda text, gold, style: zlib.crc32(text.encode()) % 2 == 0)  # sees every character
    lineage.main(one)
    lines.undo()
    found = manifest.read(one.output)
    files = {name: tables.read(one.folder / f"{name}.parquet") for name in ("tensors", "cka", "landscape")}
    return SimpleNamespace(job=one, metrics=found.metrics, card=found.card, artifacts=found.artifacts, **files)


def test_totals_are_those_of_the_whole_vectors(family, done):
    for old, new in (("base", "mid"), ("mid", "rl"), ("base", "rl")):
        a, b = flat(family.models[old]), flat(family.models[new])
        regular = np.abs(a) >= 1e-12  # the embedding of the pad token is zero
        pair, relative = f"{old}>{new}", np.abs(b - a)[regular] / np.abs(a)[regular]
        assert done.metrics[f"l2/{pair}"].value == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-4)
        assert done.metrics[f"l2_absolute/{pair}"].value == pytest.approx(np.linalg.norm(b - a), rel=1e-4)
        for name, t in (("0.1", 0.001), ("0.5", 0.005), ("1", 0.01), ("2", 0.02), ("5", 0.05), ("10", 0.1)):
            assert done.metrics[f"unchanged_{name}pct/{pair}"].value == pytest.approx((relative < t).mean(), abs=2e-4)
        assert done.metrics[f"identical/{pair}"].value == (a == b).mean()
        assert done.metrics[f"near_zero/{pair}"].value == 16 / len(a)
    assert done.metrics["unchanged_1pct/mid>rl"].value > 0.9 > 0.1 > done.metrics["unchanged_1pct/base>mid"].value
    a, b = done.metrics["l2/base>mid"].value, done.metrics["l2/mid>rl"].value
    assert done.metrics["l2_ratio/base>mid,mid>rl"].value == pytest.approx(a / b) and a / b > 100
    other = done.metrics["l2/base>mid_other"].value
    assert done.metrics["l2_ratio/base>mid_other,mid>rl"].value == pytest.approx(other / b) and other != a


def test_norms_and_other_components_have_numbers_of_their_own(family, done):
    a, b = (flat(family.models[n], lambda name: "norm" in name) for n in ("base", "mid"))
    assert done.metrics["l2/base>mid/norm"].value == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-4)
    parts = {name.rpartition("/")[2] for name in done.metrics if name.startswith("l2/base>mid/")}
    assert parts == {"embedding", "attention", "mlp", "norm"}
    assert done.metrics["l2/mid>rl/norm"].value == 0 and done.metrics["unchanged_1pct/mid>rl/norm"].value == 1


def test_every_tensor_has_a_row_and_the_tied_one_a_single_one(family, done):
    rows = [row for row in done.tensors if row["pair"] == "base>mid"]
    assert [row["tensor"] for row in rows] == sorted(n for n, _ in family.models["base"].named_parameters())
    assert sum(row["elements"] for row in rows) == family.models["base"].num_parameters()
    assert {row["pair"] for row in done.tensors} == {f"{a}>{b}" for a, b in done.job.compared} and len(done.job.compared) == 6
    assert all(row["in_total"] for row in rows) and done.card["total"] == list(lineage.COMPONENTS)
    still = [r for r in done.tensors if r["pair"] == "mid>rl" and r["tensor"] != "model.layers.1.mlp.up_proj.weight"]
    assert all(r["divergence"] == 0 and r["unchanged_0.1pct"] == 1 and r["identical"] == r["elements"] for r in still)


def test_direction_of_two_mixes(family, done):
    base, a, b = (flat(family.models[n]) for n in ("base", "mid", "mid_other"))
    x, y = a - base, b - base
    assert done.metrics["cosine/base:mid,mid_other"].value == pytest.approx(
        x @ y / np.linalg.norm(x) / np.linalg.norm(y), abs=1e-5
    )
    assert "cosine/base:mid,mid_other/attention" in done.metrics
    z = flat(family.models["rl"]) - base
    gap = x @ z / np.linalg.norm(x) / np.linalg.norm(z) - x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    assert done.metrics["cosine_gap/base:mid,rl,mid_other"].value == pytest.approx(gap, abs=1e-5) and gap > 0.5


def test_cka_of_every_layer(family, done):
    tokenizer = models.load_tokenizer(family.paths["base"])
    texts = [tokenizer(text)["input_ids"] for text in PIECES]
    x, y = (geometry.pooled(models.load(family.paths[n]), texts) for n in ("base", "mid"))
    rows = [row for row in done.cka if row["pair"] == "base>mid"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    for row, a, b in zip(rows, x, y, strict=True):
        assert row["centred"] == pytest.approx(geometry.cka(a, b), abs=1e-6)
        assert row["uncentred"] == pytest.approx(geometry.cka(a, b, centred=False), abs=1e-6)
    values = [row["centred"] for row in rows]
    assert done.metrics["cka_min/base>mid"].value == min(values) and done.metrics["cka_min/base>mid"].n == 4
    assert done.metrics["cka_mean/base>mid"].value == pytest.approx(np.mean(values))
    assert done.metrics["cka_uncentred_min/base>mid"].value == min(row["uncentred"] for row in rows)
    assert done.metrics["cka_higher_layers/mid>rl,base>mid"] == manifest.Metric(value=1.0, n=3)


def test_too_few_texts_for_cka_are_one_sentence(family, tmp_path):
    few = job(tmp_path, family, ("base", "mid"), corpus=family.corpus, texts=5, tokens=8)
    with pytest.raises(UserError, match=r"^texts = 5: .* has 4 test texts of 8 tokens; lower texts or tokens\.$"):
        lineage.main(few)
    assert lineage.pieces([[1, 2, 3, 4, 5], [6], [7, 8, 9, 10]], 2, 9) == [[1, 2], [7, 8], [3, 4], [9, 10]]
    assert lineage.pieces([[1, 2, 3], [4, 5]], 2, 1) == [[1, 2]] and lineage.pieces([], 2, 1) == []


def test_pass_rate_at_the_corners_is_that_of_the_models(family, done):
    items = tables.read(family.task.parent / "items.parquet", None, [("split", "=", "test")])[:4]
    tokenizer = models.load_tokenizer(family.paths["rl"])
    prompts = [chat.prompt_ids(tokenizer, item["prompt"]) for item in items]
    found = {(row["a"], row["b"]): row for row in done.landscape}
    rates = []
    for name, point in (("base", (0, 0)), ("mid", (1, 0)), ("rl", (1, 1))):
        seed = lineage.derive(0, "landscape")
        drawn = sample(models.load(family.paths[name]), tokenizer, prompts, count=2, max_new_tokens=4, seed=seed)
        rate = np.mean([zlib.crc32(one.text.encode()) % 2 == 0 for responses in drawn for one in responses])
        assert found[point]["pass_rate"] == rate == done.metrics[f"pass_rate/{name}"].value
        assert found[point]["n"] == 4 == done.metrics[f"pass_rate/{name}"].n
        rates.append(rate)
    assert len({row["pass_rate"] for row in done.landscape}) > 1 and rates[0] != rates[1]  # the comparison has power


def test_points_of_the_plane(done):
    shown = [(row["a"], row["b"], row["path"]) for row in done.landscape]
    grid = {(a, b) for a in (0, 0.5, 1) for b in (0, 0.5, 1)}
    path = {(a, 0) for a in (0, 0.25, 0.5, 0.75, 1)} | {(1, b) for b in (0, 0.25, 0.5, 0.75, 1)}
    assert {(a, b) for a, b, _ in shown} == grid | path and len(shown) == len(grid | path) == 13
    assert {(a, b) for a, b, on_path in shown if on_path} == path
    assert len(lineage.points(5, 5)) == 25 and sum(lineage.points(5, 5).values()) == 9


def test_an_identical_rerun_writes_an_identical_manifest(family, tmp_path):
    written = []
    for name in ("one", "two"):
        one = job(tmp_path / name, family, path=("base", "mid", "rl"), corpus=family.corpus, task=family.task, items=2)
        one = one.model_copy(update={"grid": 2, "path_points": 2, "max_new_tokens": 2, "texts": 3, "tokens": 8})
        lineage.main(one)
        written.append(one.output.read_bytes())
    assert written[0] == written[1]
    lines = json.loads(written[0])["metrics"]
    assert {"pass_rate/base", "cka_min/base>rl", "l2/mid>rl"} <= set(lines)


def test_only_named_components_enter_the_total(family, tmp_path):
    one = job(tmp_path, family, ("base", "mid"), total=("attention", "mlp"))
    lineage.main(one)
    found = manifest.read(one.output)
    a, b = (flat(family.models[n], lambda name: "proj" in name) for n in ("base", "mid"))
    assert found.metrics["l2/base>mid"].value == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-4)
    rows = tables.read(one.folder / "tensors.parquet")
    assert {row["component"] for row in rows if not row["in_total"]} == {"embedding", "norm"}
    assert "l2/base>mid/norm" in found.metrics and set(found.artifacts) == {"tensors.parquet"}
    nothing = job(tmp_path / "ssm", family, ("base", "mid"), total=("ssm",))
    with pytest.raises(UserError, match=r"total = \['ssm'\] holds no tensor .* 'mlp', 'norm'"):
        lineage.main(nothing)


def test_storage_dtype_is_on_the_card_and_hides_small_changes(family, tmp_path):
    """At a thousandth of each weight, bf16 keeps most elements as they were: the pitfall, seen in the numbers."""
    base, tokenizer = tiny(seed=0)
    moved, _ = tiny(seed=0)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1.001)
    shares = {}
    for kind in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(kind)
        paths = {n: store(folder / n, m.to(kind), tokenizer) for n, m in (("base", base), ("rl", moved))}
        one = job(folder, SimpleNamespace(paths=paths), ("base", "rl"))
        lineage.main(one)
        found = manifest.read(one.output)
        shares[kind] = found.metrics["identical/base>rl"].value
        base, moved = tiny(seed=0)[0], moved.float()
    assert shares[torch.float32] < 0.01 and shares[torch.bfloat16] > 0.5
    assert set(found.card["dtypes"]["base"]) == {"BF16"}


def test_copies_of_tied_tensors_do_not_count_twice(family, tmp_path):
    numbers = []
    for copies in (False, True):
        folder = tmp_path / str(copies)
        paths = {n: store(folder / n, family.models[n], tiny(0)[1], copies=copies) for n in ("base", "mid")}
        one = job(folder, SimpleNamespace(paths=paths), ("base", "mid"))
        lineage.main(one)
        found = manifest.read(one.output)
        numbers.append({name: value.value for name, value in found.metrics.items()})
    assert numbers[0] == numbers[1] and found.card["tied_copies_left_out"]["base"] == ["lm_head.weight"]


def test_what_did_not_move_has_no_ratio_and_no_cosine(family, tmp_path):
    """RL from a base without any reward leaves the weights as they are; that is a result, not an error."""
    paths = {"base": family.paths["base"], "mid": family.paths["mid"], "rl": family.paths["mid"]}
    one = job(
        tmp_path,
        SimpleNamespace(paths=paths),
        path=("base", "mid", "rl"),
        directions=(("mid", "rl", "base"),),
        corpus=family.corpus,
        texts=4,
        tokens=8,
    )
    lineage.main(one)
    found = manifest.read(one.output)
    assert found.metrics["l2/mid>rl"].value == 0 and found.metrics["unchanged_0.1pct/mid>rl"].value == 1
    assert not any(name.startswith(("l2_ratio", "cosine")) for name in found.metrics)
    assert {"l2_ratio/base>mid,mid>rl", "cosine/mid:rl,base", "cosine/mid:rl,base/mlp"} <= set(found.card["undefined"])


def test_another_shape_is_one_sentence(family, tmp_path):
    paths = {"base": family.paths["base"], "mid": store(tmp_path / "wide", *tiny(seed=0, hidden=24))}
    with pytest.raises(UserError, match=r"tensor model\.embed_tokens\.weight is \[\d+, 16\] in .*; give checkpoints of one"):
        lineage.main(job(tmp_path, SimpleNamespace(paths=paths), ("base", "mid")))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"names": ("base",)}, "a comparison needs two"),
        ({"pairs": (("base", "md"),)}, "'md' in pairs, directions, gaps, ratios or path is no name in models"),
        ({"directions": (("base", "mid", "rll"),)}, "'rll' in pairs"),
        ({"ratios": (("base", "mid", "mid", "rl2"),)}, "'rl2' in pairs"),
        ({"pairs": (("base", "mid"),), "ratios": (("base", "mid", "mid", "rl"),)}, r"ratios need the step \['mid', 'rl'\] among"),
        ({"gaps": (("base", "mid", "rl", "mid"),)}, r"gaps need \['base', 'mid', 'mid'\] among directions"),
        ({"task": "t"}, "name them in path or remove task"),
        ({"samples": 3}, "samples = 3 greedy answers"),
        ({"pairs": (("base", "mid"),), "path": ("base", "mid", "rl")}, "needs its two steps among pairs"),
    ],
)
def test_contradictions_are_refused(family, tmp_path, more, sentence):
    with pytest.raises(ValueError, match=sentence):
        job(tmp_path, family, **more)


def test_default_pairs_do_not_depend_on_the_order_of_the_mapping(family, tmp_path):
    """The command line sorts a mapping's keys, so the order in a YAML never arrives."""
    one = job(tmp_path, family, ("rl", "mid_other", "base", "mid"), path=("mid", "rl", "base"))
    assert one.compared[:4] == (("mid", "rl"), ("mid", "base"), ("mid", "mid_other"), ("rl", "base"))
    assert job(tmp_path, family, ("rl", "base", "mid")).compared == (("base", "mid"), ("base", "rl"), ("mid", "rl"))
