"""Training: one gradient however a batch is cut, paired arms, stored statistics, cut students, resume, one vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from posttrain.core import config, determinism, manifest, models, tables
from posttrain.core.errors import TimeLimitReached, UserError
from posttrain.core.models import Shape
from posttrain.core.tracking import read_history
from posttrain.distill import examples, measure, overhead, student, tail_kd, teacher
from posttrain.distill.formulas import Divergence

SMALL = Shape(hidden=16, layers=1, heads=1, intermediate=32, context=128)


def output(folder: Path, method: str, variant: str = "a") -> Path:
    path = folder / "distill" / method / variant / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def job(world, folder: Path, **options) -> tail_kd.Config:
    defaults = {"steps": 4, "batch_size": 8, "length": 32, "learning_rate": 3e-3, "measure_every": 2, "held_out_rows": 8}
    defaults |= {"head": 4, "divergence": Divergence(k=4), "shape": SMALL, "teacher": world.base, "mix": world.mix}
    return tail_kd.Config(output=output(folder, "tail_kd"), **(defaults | options))


def run(world, folder: Path, **options) -> tail_kd.Config:
    one = job(world, folder, **options)
    tail_kd.main(one)
    return one


def one_step(world, folder: Path, accumulation: int, **options) -> torch.Tensor:
    """The update of one SGD step on eight ragged rows, flattened."""
    from transformers import TrainingArguments

    from posttrain.core.training import arguments

    determinism.setup(0)
    one = job(world, folder, steps=1, accumulation=accumulation, learning_rate=1.0, max_grad_norm=1e9, warmup=0.0, **options)
    tokenizer, frozen = models.load_tokenizer(world.base), models.load(world.base).eval()
    rows = examples.Source(None, world.task, None).rows("train", 32, tokenizer)[:8]
    rows = [{n: v[: 8 + i] for n, v in row.items()} for i, row in enumerate(rows)]
    model = tail_kd.begin(one, frozen, tokenizer)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    args = TrainingArguments(**arguments(one))
    trainer = tail_kd.make_trainer(model, frozen, one, rows, tokenizer.pad_token_id, None, [], args)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


@pytest.mark.parametrize("kind", ["tad", "rkl"])
def test_update_does_not_depend_on_accumulation_or_chunk(world, tmp_path, kind):
    whole = one_step(world, tmp_path / "1", 1, divergence=Divergence(kind=kind, k=4))
    assert whole.norm() > 1e-3
    for accumulation, chunk in ((4, None), (8, None), (1, 3)):
        cut = one_step(world, tmp_path / f"{accumulation}", accumulation, divergence=Divergence(kind=kind, k=4), chunk=chunk)
        assert ((cut - whole).norm() / whole.norm()).item() < 1e-5


def test_update_is_that_of_the_definition(world, tmp_path):
    """Autograd through plain KL and cross-entropy, mean over all response tokens."""
    update = one_step(world, tmp_path, 2, divergence=Divergence(kind="kl"), weight=2.0, ce_weight=0.5)
    determinism.setup(0)
    one = job(world, tmp_path)
    tokenizer, frozen = models.load_tokenizer(world.base), models.load(world.base).eval()
    rows = examples.Source(None, world.task, None).rows("train", 32, tokenizer)[:8]
    model = tail_kd.begin(one, frozen, tokenizer)
    total, count = 0.0, 0
    for i, row in enumerate(rows):
        ids, labels = row["input_ids"][None, : 8 + i], row["labels"][: 8 + i]
        s, t = model(ids).logits[0, :-1].log_softmax(-1), frozen(ids).logits[0, :-1].log_softmax(-1).detach()
        at = labels[1:] != -100
        total = total + 2 * (t.exp() * (t - s)).sum(-1)[at].sum() - 0.5 * s[at].gather(-1, labels[1:][at][:, None]).sum()
        count += int(at.sum())
    (total / count).backward()
    wanted = -torch.cat([p.grad.flatten() for p in model.parameters()])
    assert 0 < count < 8 * 11 and ((update - wanted).norm() / wanted.norm()).item() < 1e-4


@pytest.fixture(scope="module")
def arms(world, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("arms")
    return SimpleNamespace(
        tad=run(world, folder / "tad"),
        kd=run(world, folder / "kd", divergence=Divergence(kind="kl")),
        clm=run(world, folder / "clm", divergence=Divergence(kind="none")),
    )


def test_arms_are_paired_and_measured_alike(world, arms):
    histories = {name: read_history(one.folder / "history.jsonl") for name, one in vars(arms).items()}
    first = {name: lines[0] for name, lines in histories.items()}
    assert len({line["ce"] for line in first.values()}) == 1  # same initialisation, same first batch
    assert first["tad"]["divergence"] > first["kd"]["divergence"] > 0 == first["clm"]["divergence"]
    assert first["tad"]["beta_x"] > 2 and "beta_x" not in first["kd"]
    assert first["kd"]["loss"] == pytest.approx(first["kd"]["ce"] + first["kd"]["divergence"], rel=1e-3)
    points = [line for line in histories["tad"] if "fixed/kl" in line]
    assert [line["step"] for line in points] == [2, 4] and {f"fixed/{n}" for n in measure.FIXED} <= points[0].keys()
    for line in points:
        whole = line["fixed/kl1"] + line["fixed/alpha_t"] * line["fixed/kl2"]
        assert line["fixed/kl"] == pytest.approx(whole, rel=0.5)  # a mean of products is not the product of means
    tokens = {name: [r["tokens"] for r in tables.read(one.folder / "rows.parquet")] for name, one in vars(arms).items()}
    assert tokens["tad"] == tokens["kd"] == tokens["clm"] and len(tokens["tad"]) == 8
    flops = {name: manifest.read(one.output).metrics["petaflops_per_million_tokens"].value for name, one in vars(arms).items()}
    frozen = models.load(world.base).num_parameters()
    assert flops["tad"] == flops["kd"] == pytest.approx(flops["clm"] + 2 * frozen * 1e-9)


def test_rows_are_measured_as_defined(world, arms):
    tokenizer = models.load_tokenizer(world.base)
    rows = examples.Source(world.mix, None, None).rows("test", 32, tokenizer)[:8]
    frozen, model = models.load(world.base).eval(), models.read(arms.tad.folder / "model").eval()
    table = tables.read(arms.tad.folder / "rows.parquet")
    row = rows[3]
    with torch.no_grad():
        lt, ls = (examples.logits_of(m, {n: v[None] for n, v in row.items()})[0, :-1].log_softmax(-1) for m in (frozen, model))
    at = row["labels"][1:] != -100
    kl = (lt.exp() * (lt - ls)).sum(-1)[at].mean()
    ce = -ls.gather(-1, row["input_ids"][1:, None])[:, 0][at].mean()
    assert table[3]["kl"] == pytest.approx(float(kl), rel=1e-4) and table[3]["ce"] == pytest.approx(float(ce), rel=1e-4)
    assert table[3]["tokens"] == int(at.sum())
    own, buckets, _ = measure.on_rows(frozen, frozen, rows, tokenizer.pad_token_id, 4, None, batch=3)
    assert all(abs(r["kl"]) < 1e-12 and r["top1"] == 1 and r["spearman"] == 1 and r["alpha_gap"] == 0 for r in own)
    assert [r["tokens"] for r in own] == [r["tokens"] for r in table] and sum(b["student"] for b in buckets) == pytest.approx(1)


def test_the_tails_share_of_the_gradient_is_that_of_autograd(world, arms):
    """The same head for every divergence, kl too; TAD's own formula by autograd."""
    tokenizer = models.load_tokenizer(world.base)
    row = examples.Source(world.mix, None, None).rows("test", 32, tokenizer)[3]
    frozen, model = models.load(world.base).eval(), models.read(arms.tad.folder / "model").eval()
    with torch.no_grad():
        t, s = (examples.logits_of(m, {n: v[None] for n, v in row.items()})[0, :-1].double() for m in (frozen, model))
    at = row["labels"][1:] != -100
    lt, s = t[at].log_softmax(-1), s[at].requires_grad_(True)
    ls, top = s.log_softmax(-1), lt.topk(4, -1).indices
    tail = torch.ones_like(lt).scatter_(-1, top, 0.0).bool()
    at_, as_ = ((lp.exp() * tail).sum(-1) for lp in (lt, ls))
    head = (lt.exp() * (lt - ls) * ~tail).sum(-1)
    kl1 = head + at_ * (at_ / as_).log()
    scaled = (lt.exp() * (lt - ls) * tail).sum(-1) - at_ * (at_ / as_).log()
    beta = arms.tad.divergence.beta / at_.mean().detach()
    (table,) = [tables.read(arms.tad.folder / "rows.parquet")[3]]
    for name, value in (("tail_share", kl1 + beta * scaled), ("tail_share_kl", kl1 + scaled)):
        energy = torch.autograd.grad(value.sum(), s, retain_graph=True)[0].square()
        share = ((energy * tail).sum(-1) / energy.sum(-1)).mean()
        assert table[name] == pytest.approx(float(share), rel=1e-3)
    plain = tables.read(arms.kd.folder / "rows.parquet")[3]
    assert plain["tail_share"] == plain["tail_share_kl"]
    assert "tail_share" not in tables.read(arms.clm.folder / "rows.parquet")[3]
    assert all("fixed/tail_share" in line for line in read_history(arms.kd.folder / "history.jsonl") if "fixed/kl" in line)


def test_resume_after_an_interruption_gives_the_same_model_and_history(world, tmp_path, arms):
    with pytest.raises(TimeLimitReached, match="step 1 of 4"):
        run(world, tmp_path / "b", checkpoint_every=1, max_minutes=1e-9)
    resumed = run(world, tmp_path / "b", checkpoint_every=1)
    assert resumed.output.read_bytes() == arms.tad.output.read_bytes()
    assert (resumed.folder / "history.jsonl").read_bytes() == (arms.tad.folder / "history.jsonl").read_bytes()
    assert not (resumed.folder / "checkpoints").exists()


@pytest.fixture(scope="module")
def statistics(world, tmp_path_factory) -> Path:
    path = output(tmp_path_factory.mktemp("statistics"), "teacher")
    teacher.main(teacher.Config(output=path, model=world.base, mix=world.mix, length=32, shard_rows=7, batch=5))
    return path


def test_stored_statistics_are_those_of_the_teacher(world, statistics, arms, tmp_path):
    tokenizer, frozen = models.load_tokenizer(world.base), models.load(world.base).eval()
    rows = examples.Source(world.mix, None, None).rows("train", 32, tokenizer)
    stored = teacher.Stored(statistics, rows, world.base)
    found = manifest.read(statistics)
    assert len(stored) == len(rows) == found.card["rows"] > 14
    for i in (0, 6, 7, len(rows) - 1):  # both sides of a file's end
        with torch.no_grad():
            wanted = examples.logits_of(frozen, {n: v[None] for n, v in rows[i].items()})[0].log_softmax(-1)
        _, mask = examples.following(rows[i]["labels"][None])
        got = stored[i]["logps"]
        assert got.dtype == torch.float16 and (got.float() - wanted)[mask[0]].abs().max() < 0.02 and not got[~mask[0]].any()
    assert 0 < found.metrics["rounding_kl"].value < 1e-5 and 0 < found.metrics["rounding_logp"].value < 0.02
    assert found.metrics["gigabytes"].value == pytest.approx(found.metrics["positions"].value * 16 * 2 / 1e9)
    offline = run(world, tmp_path, statistics=statistics)
    one, other = (read_history(j.folder / "history.jsonl") for j in (arms.tad, offline))
    assert [line["divergence"] for line in one] == pytest.approx([line["divergence"] for line in other], rel=1e-2)
    assert one[0]["ce"] == other[0]["ce"]


def test_statistics_of_something_else_are_refused(world, statistics, tmp_path):
    tokenizer = models.load_tokenizer(world.base)
    rows = examples.Source(world.mix, None, None).rows("train", 32, tokenizer)
    with pytest.raises(UserError, match="are of other rows than this job trains on"):
        teacher.Stored(statistics, rows[::-1], world.base)
    with pytest.raises(UserError, match="made by another model than the teacher"):
        teacher.Stored(statistics, rows, world.tokenizer)
    small = teacher.Config(output=output(tmp_path, "teacher"), model=world.base, mix=world.mix, length=32, max_gb=1e-6)
    with pytest.raises(UserError, match=r"^statistics of \d+ positions over 16 tokens take 0\.000\d+ GB and max_gb is 1e-06; "):
        teacher.main(small)
    assert not list(small.folder.glob("*.safetensors"))


def test_supervised_rows(world, tmp_path):
    """Demonstrations and traces: only responses are targets, and both train."""
    tokenizer = models.load_tokenizer(world.base)
    for name in ("task", "traces"):
        source = examples.Source(*(getattr(world, n) if n == name else None for n in ("mix", "task", "traces")))
        rows = source.rows("train", 32, tokenizer)
        for row in rows[:20]:
            at = row["labels"] != -100
            assert not at[0] and at[-1] and bool((at.int().diff() >= 0).all())  # prompt, then response
            assert torch.equal(row["labels"][at], row["input_ids"][at])
    stored = [r for r in tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")]) if r["correct"]]
    assert len(rows) == len(stored)
    for row, one in zip(rows, stored, strict=True):  # `rows` are now those of the traces
        at = row["labels"] != -100
        assert row["input_ids"][~at].tolist() == one["prompt_ids"] and row["labels"][at].tolist() == one["response_ids"]
    fewer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    with pytest.raises(
        UserError, match=r"holds the token id \d+, and the student's tokenizer has 2 tokens; take traces of a model"
    ):
        source.rows("train", 32, fewer)
    batch = examples.collate([{n: v[:4] for n, v in rows[0].items()}, rows[1]], tokenizer.pad_token_id)
    assert batch["labels"][0, 4:].eq(-100).all() and batch["position_ids"][0, 3:6].tolist() == [3, 0, 1]
    one = run(world, tmp_path, mix=None, traces=world.traces, steps=2)
    assert {row["tokens"] for row in tables.read(one.folder / "rows.parquet")} == {
        int((r["labels"] != -100).sum()) for r in rows[:1]
    }


def test_a_student_is_cut_from_its_teacher(world, tmp_path):
    determinism.setup(0)
    frozen = models.load(world.base)
    made = student.cut(frozen, SMALL)
    have, got = frozen.state_dict(), made.state_dict()
    for name in ("q", "k", "v", "o"):
        whole = have[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert torch.equal(got[f"model.layers.0.self_attn.{name}_proj.weight"], whole[:16, :16])
    assert torch.equal(got["model.embed_tokens.weight"], have["model.embed_tokens.weight"][:, :16])
    mlp = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(got[mlp], have[mlp][:32, :16])
    determinism.setup(1)
    assert not torch.equal(student.cut(frozen, SMALL).state_dict()[mlp], got[mlp])
    whole = Shape(
        hidden=frozen.config.hidden_size,
        layers=1,
        heads=frozen.config.num_attention_heads,
        intermediate=frozen.config.intermediate_size,
        context=128,
    )
    shallow = student.cut(frozen, whole).state_dict()  # MLPs are random also where those of the teacher would fit
    assert all(not torch.equal(v, have[n]) for n, v in shallow.items() if ".mlp." in n)
    assert torch.equal(shallow["model.embed_tokens.weight"], have["model.embed_tokens.weight"])
    assert [student.layer_of(i, 3, 9) for i in range(3)] == [0, 4, 8] and student.layer_of(0, 1, 9) == 0
    size, frozen.config.head_dim = frozen.config.head_dim, None  # an architecture whose head size follows from the width
    with pytest.raises(UserError, match=r"hidden 16 over heads 2 is not the teacher's head size 16.*choose heads = 1"):
        student.cut(frozen, SMALL.model_copy(update={"heads": 2}))
    frozen.config.head_dim = size
    with pytest.raises(UserError, match="can only be cut smaller"):
        student.cut(frozen, SMALL.model_copy(update={"hidden": 64, "heads": 4}))
    run(world, tmp_path / "cut", student="cut", steps=1)
    begun = run(world, tmp_path / "start", student="start", shape=None, start=world.base, steps=1, learning_rate=1e-9)
    assert manifest.read(begun.output).metrics["kl"].value < 1e-6
    assert load_file(begun.folder / "model/model.safetensors")


def test_one_vocabulary(world):
    tokenizer = models.load_tokenizer(world.base)
    assert examples.one_vocabulary(tokenizer, tokenizer, (world.base, world.base)) == 16
    from posttrain.data import tokenizer as made

    other = made.wrap(made.characters("0123546789=ab#"))
    with pytest.raises(UserError, match=r"^token 6 is '4' for the teacher .* and '5' for the student .*; divergences need one"):
        examples.one_vocabulary(tokenizer, other, (world.base, Path("x")))
    longer = made.wrap(made.characters("0123456789=ab#!"))
    with pytest.raises(UserError, match=r"^token 16 is None for the teacher .* and '!' for the student"):
        examples.one_vocabulary(tokenizer, longer, (world.base, Path("x")))
    models_of = [SimpleNamespace(config=SimpleNamespace(vocab_size=n)) for n in (18, 18, 24, 17)]
    assert examples.columns(18, *models_of[:2]) is None and examples.columns(18, *models_of[:3]) == 18
    with pytest.raises(UserError, match="17 logits for 18 tokens"):
        examples.columns(18, *models_of)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mix": None}, "give one of mix, task and traces; with stream it is what the arm is judged on"),
        ({"start": "x"}, "student: start needs start and no shape; scratch and cut need a shape and no start"),
        ({"ce_weight": 0.0, "weight": 0.0}, "ce_weight, weight and divergence leave no loss; raise one of them"),
        ({"divergence": {"kind": "topk_only", "k": 0}}, "kind: topk_only needs k of at least 1"),
    ],
)
def test_contradictions_are_one_sentence(world, tmp_path, change, message):
    values = job(world, tmp_path).model_dump() | change
    with pytest.raises(UserError, match=message):
        config.validate(tail_kd.Config, values, "x")


def test_overhead_measures_every_divergence_on_every_batch(world, tmp_path):
    path = output(tmp_path, "overhead")
    overhead.main(
        overhead.Config(
            output=path, teacher=world.base, mix=world.mix, shape=SMALL, length=32, batch_size=4, repeats=2, warmup_batches=1
        )
    )
    rows = tables.read(path.parent / "step_times.parquet")
    assert len(rows) == 2 and all(row[name] > 0 for row in rows for name in overhead.ARMS)
    assert set(manifest.read(path).metrics) == {"log_ratio/none", "log_ratio/rkl", "log_ratio/tad"}
