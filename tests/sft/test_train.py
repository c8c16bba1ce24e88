"""The SFT trainer: one gradient however a batch is cut, the same loss as TRL's, resume, frozen ratios, bad traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, models, tables
from posttrain.core.errors import TimeLimitReached, UserError
from posttrain.sft import train
from posttrain.sft.traces import check


def job(world, folder: Path, **options) -> train.Config:
    output = folder / "sft" / "train" / "two_style-arm" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    defaults = {"steps": 6, "batch_size": 16, "clip_delta": (-1.0, 0.5), "start": world.base, "traces": world.traces}
    return train.Config(output=output, **(defaults | options))


def ragged(world) -> list[dict]:
    """Examples of very different lengths: responses cut to 1..9 tokens."""
    rows = tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")])[:16]
    cut = []
    for i, row in enumerate(rows):
        keep = 1 + (i * 5) % 9
        cut.append(
            train.example({**row, **{n: row[n][:keep] for n in ("response_ids", "logp_beta", "top_ids", "top_logps")}}, 64)
        )
    return cut


def one_step(world, folder, accumulation: int, weighting: str, loss: str = "nll", norm: str = "tokens") -> torch.Tensor:
    """The update of one SGD step on the same 16 examples, flattened, float32."""
    from posttrain.core import determinism

    determinism.setup(0)
    config = job(
        world,
        folder,
        steps=1,
        accumulation=accumulation,
        weighting=weighting,
        loss=loss,
        norm=norm,
        learning_rate=1.0,
        max_grad_norm=1e9,
        warmup=0.0,
    )
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer = train.make_trainer(model, config, ragged(world), tokenizer.pad_token_id, [])
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


@pytest.mark.parametrize(
    ("weighting", "loss", "norm"),
    [
        ("sft", "nll", "tokens"),
        ("pear_sequence", "nll", "tokens"),
        ("pear_token", "kl", "tokens"),
        ("pear_block", "nll", "per_sequence"),
        ("dft", "nll", "self"),
    ],
)
def test_update_does_not_depend_on_accumulation(world, tmp_path, weighting, loss, norm):
    whole = one_step(world, tmp_path / "1", 1, weighting, loss, norm)
    assert whole.norm() > 1e-4
    for accumulation in (2, 8, 16):
        cut = one_step(world, tmp_path / str(accumulation), accumulation, weighting, loss, norm)
        assert ((cut - whole).norm() / whole.norm()).item() < 1e-5


RANKS = """
import os, sys, torch
sys.path.insert(0, sys.argv[4])
from types import SimpleNamespace
from pathlib import Path
torch.distributed.init_process_group("gloo")
import test_train as t
base, traces, out = map(Path, sys.argv[1:4])
world = SimpleNamespace(base=base, traces=traces)
update = t.one_step(world, out.parent / "ranks", 2, "pear_sequence")
if os.environ["RANK"] == "0":
    torch.save(update, out)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_update_does_not_depend_on_the_number_of_processes(world, tmp_path):
    whole = one_step(world, tmp_path / "one", 1, "pear_sequence")
    script, out = tmp_path / "ranks.py", tmp_path / "update.pt"
    script.write_text(RANKS)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    words += [str(world.base), str(world.traces), str(out), str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    two = torch.load(out)
    assert ((two - whole).norm() / whole.norm()).item() < 1e-5


def test_plain_sft_and_dft_equal_trl(world, tmp_path):
    """The same batch through TRL's SFTTrainer (nll and dft) and through ours gives the same loss."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")])[:16]
    tokenizer = models.load_tokenizer(world.base)
    data = Dataset.from_list(
        [
            {
                "input_ids": r["prompt_ids"] + r["response_ids"],
                "completion_mask": [0] * len(r["prompt_ids"]) + [1] * len(r["response_ids"]),
            }
            for r in rows
        ]
    )
    for weighting, loss_type in (("sft", "nll"), ("dft", "dft")):
        model = models.load(world.base)
        args = SFTConfig(
            output_dir=str(tmp_path / loss_type),
            use_cpu=True,
            bf16=False,
            report_to="none",
            loss_type=loss_type,
            max_length=None,
            completion_only_loss=True,
            per_device_train_batch_size=16,
            disable_tqdm=True,
            activation_checkpointing=False,
        )
        theirs = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
        batch = next(iter(theirs.get_train_dataloader()))
        count = (batch["labels"][:, 1:] != -100).sum()
        expected = theirs.compute_loss(model, dict(batch), num_items_in_batch=count).item()
        mine = train.collate([train.example(row, 64) for row in rows], tokenizer.pad_token_id)
        value, _ = train.batch_loss(model, mine, job(world, tmp_path, weighting=weighting), count)
        assert value.item() == pytest.approx(expected, rel=1e-6)


def test_examples_align_labels_and_behaviour_log_probabilities(world):
    row = tables.read(world.traces.parent / "traces.parquet")[0]
    one = train.example(row, 64)
    head = len(row["prompt_ids"])
    assert one["labels"].tolist() == [-100] * head + row["response_ids"]
    assert one["logp_beta"][head:].tolist() == pytest.approx(row["logp_beta"]) and one["logp_beta"][:head].abs().sum() == 0
    assert one["top_logps"][:head].max() == -torch.inf
    cut = train.example(row, head + 2)
    assert [len(cut[n]) for n in ("input_ids", "labels", "logp_beta", "top_ids", "top_logps")] == [head + 2] * 5


def test_eos_label_survives_when_pad_is_eos(world):
    rows = [train.example(r, 64) for r in tables.read(world.traces.parent / "traces.parquet")[:3]]
    eos = models.load_tokenizer(world.base).eos_token_id
    batch = train.collate([rows[0], {k: v[:8] if v.ndim else v for k, v in rows[1].items()}], pad=eos)
    assert batch["labels"][0, -1] == eos and batch["labels"][1, -1] == train.IGNORE
    assert batch["attention_mask"].sum(1).tolist() == [len(rows[0]["input_ids"]), 8]


def test_frozen_base_equals_live_at_the_first_step_only(world, tmp_path):
    live = one_step(world, tmp_path / "live", 1, "pear_sequence")
    config = job(
        world,
        tmp_path / "frozen",
        steps=1,
        weighting="pear_sequence",
        ratio_model="frozen_base",
        learning_rate=1.0,
        max_grad_norm=1e9,
        warmup=0.0,
    )
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    data = ragged(world)
    train.add_frozen(model, data, tokenizer.pad_token_id)
    trainer = train.make_trainer(model, config, data, tokenizer.pad_token_id, [])
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.train()
    frozen = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert ((frozen - live).norm() / live.norm()).item() < 1e-5
    batch = train.collate(data, tokenizer.pad_token_id)
    count = int((batch["labels"][:, 1:] != -100).sum())
    moved, _ = train.batch_loss(model, batch, config, count)
    free, _ = train.batch_loss(model, {k: v for k, v in batch.items() if k != "logp_frozen"}, config, count)
    assert abs(moved.item() - free.item()) > 1e-6  # after the step the live ratio has moved, the frozen one has not


def test_same_run_twice_and_resume_are_bit_identical(world, tmp_path):
    def run(name, **options):
        config = job(world, tmp_path / name, weighting="pear_token", checkpoint_every=2, **options)
        train.main(config)
        return config

    first, second = run("a"), run("b")
    assert first.output.read_bytes() == second.output.read_bytes()
    with pytest.raises(TimeLimitReached, match="step 1 of 6"):
        run("c", max_minutes=1e-9)
    stopped = tmp_path / "c" / first.output.relative_to(tmp_path / "a")
    assert not stopped.exists() and list(stopped.parent.glob("checkpoints/*/checkpoint-1/complete.json"))
    third = run("c")
    history = [json.loads(line)["step"] for line in (third.folder / "history.jsonl").read_text().splitlines()]
    assert history == [1, 2, 3, 4, 5, 6]
    assert third.output.read_bytes() == first.output.read_bytes()
    assert not (third.folder / "checkpoints").exists()


def test_parameters_are_float32_and_move(world, tmp_path):
    model = models.load(world.base)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer = train.make_trainer(model, job(world, tmp_path, steps=1, warmup=0.0), ragged(world), 0, [])
    trainer.train()
    states = [v for state in trainer.optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
    assert {v.dtype for v in states} == {torch.float32}
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) != before
    assert moved.double().mean() > 0.5


def test_nan_loss_stops_with_a_sentence(world, tmp_path):
    config = job(world, tmp_path, learning_rate=1e30, max_grad_norm=1e30, warmup=0.0)
    with pytest.raises(UserError, match=r"(loss|grad_norm) is (nan|inf) at step \d+ .*lower learning_rate"):
        train.main(config)
    assert not config.output.exists()


def test_trace_with_a_wrong_number_of_log_probabilities(world, tmp_path):
    rows = tables.read(world.traces.parent / "traces.parquet")
    rows[3]["logp_beta"] = rows[3]["logp_beta"][:-1]
    with pytest.raises(UserError, match="row 3: 8 behaviour log-probabilities for 9 response tokens"):
        check(rows, tmp_path / "traces.parquet")
    rows[3]["logp_beta"] = [*rows[3]["logp_beta"], float("nan")]
    with pytest.raises(UserError, match="row 3: a behaviour log-probability is not finite"):
        check(rows, tmp_path / "traces.parquet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_delta": (0.5, -0.5)}, "lower bound"),
        ({"loss": "kl", "negative_strength": 0.1}, "negative_strength needs loss: nll"),
        ({"batch_size": 10, "accumulation": 3}, "not a multiple of accumulation"),
    ],
)
def test_contradictory_settings_are_refused(world, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        job(world, tmp_path, **options)


def test_metrics_of_a_job(world, tmp_path):
    config = job(world, tmp_path, weighting="pear_sequence")
    train.main(config)
    found = manifest.read(config.output)
    assert {
        "validation/nll",
        "weights/mean",
        "weights/ess",
        "weights/floor",
        "weights/cap",
        "grad_norm/mean",
    } <= found.metrics.keys()
    rows = tables.read(config.folder / "validation.parquet")
    assert found.metrics["validation/nll"].value == pytest.approx(sum(r["nll"] for r in rows) / sum(r["tokens"] for r in rows))
    assert found.inputs.keys() == {"start", "traces"} and found.not_deterministic is None


def test_generation_stops_after_training_when_pad_is_eos(world, tmp_path):
    """Twenty copies of one answer, padded with EOS: the model learns to end, because the real EOS stays a label."""
    from posttrain.core.generation import sample

    row = tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")])[0]
    short = {**row, **{n: [*row[n][:3], row[n][-1]] for n in ("response_ids", "logp_beta", "top_ids", "top_logps")}}
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    other = tables.read(world.traces.parent / "traces.parquet", None, [("split", "=", "train")])[1]
    data = [train.example(one, 64) for one in [short] * 20 + [other] * 4]  # two lengths, so that the copies are padded
    config = job(world, tmp_path, steps=60, batch_size=24, learning_rate=5e-3)
    train.make_trainer(model, config, data, tokenizer.eos_token_id, []).train()
    ((answer,),) = sample(model, tokenizer, [row["prompt_ids"]], count=1, max_new_tokens=30, seed=0, temperature=0)
    assert answer.finished and answer.ids == short["response_ids"]
