"""The plan's formulas against numbers worked out by hand, and its job counts against Snakemake's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import cost, plan
from posttrain.core import config as configs
from posttrain.core.errors import UserError
from posttrain.cost import Architecture
from posttrain.study import Study

ROOT = Path(__file__).parents[1]
SMALL = Architecture(hidden=8, layers=2, heads=4, kv_heads=2, intermediate=16, vocab=32)  # heads of 2


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def hardware(tier: str) -> plan.Hardware:
    return configs.validate(plan.Hardware, configs.read_yaml(f"configs/{tier}/hardware.yaml"), tier)


# --- parameters ---


def test_parameters_by_hand():
    """Per block: q 8x8, k and v 8x4 each, o 8x8, MLP 3x8x16, two norms of 8; then a final norm and the embedding."""
    block = 64 + 2 * 32 + 64 + 384 + 16
    assert SMALL.parameters == 2 * block + 8 + 32 * 8 == 1448
    assert SMALL.model_copy(update={"tied": False}).parameters == 1448 + 256
    assert SMALL.model_copy(update={"bias": True}).parameters == 1448 + 2 * (8 + 4 + 4)
    assert SMALL.model_copy(update={"qk_norm": True}).parameters == 1448 + 2 * (2 + 2)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Llama", {}), ("Llama", {"tied": False}), ("Qwen2", {"bias": True}), ("Qwen3", {"qk_norm": True, "head_dim": 6})],
)
def test_parameters_equal_those_of_transformers(kind, more):
    import torch
    import transformers

    shape = SMALL.model_copy(update=more)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert shape.parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("tier", "name", "billions"),
    [  # as the model cards state them
        ("small", "Qwen/Qwen2.5-0.5B", 0.49),
        ("paper", "Qwen/Qwen2.5-1.5B", 1.54),
        ("paper", "Qwen/Qwen2.5-7B-Instruct", 7.61),
        ("paper", "Qwen/Qwen3-1.7B-Base", 1.7),
        ("paper", "Qwen/Qwen3-4B", 4.0),
        ("tiny", "base/packaged/smollm2", 0.135),
        ("paper", "ibm-granite/granite-3.3-8b-base", 8.17),
        ("paper", "meta-llama/Llama-3.1-8B", 8.03),
        ("paper", "mistralai/Mistral-7B-v0.1", 7.24),
        ("paper", "mistralai/Mistral-Small-24B-Base-2501", 23.6),
        ("paper", "ibm-granite/granite-4.0-micro-base", 3.4),
    ],
)
def test_shapes_add_up_to_the_published_size(tier, name, billions):
    assert hardware(tier).models[name].parameters == pytest.approx(billions * 1e9, rel=0.02)


# --- memory ---


@pytest.mark.parametrize("cards", [1, 8])
def test_zero_3_divides_all_states(cards):
    states = cost.state_bytes(1_000_000, "bfloat16", "zero3", cards)
    assert (states.parameters, states.gradients, states.optimizer) == (2e6 / cards, 2e6 / cards, 12e6 / cards)
    assert states.peak == pytest.approx(16e6 / cards)


def test_lower_stages_and_offload():
    def parts(name):
        m = cost.state_bytes(1_000_000, "bfloat16", name, 4)
        return m.parameters, m.gradients, m.optimizer

    assert parts("zero1") == (2e6, 2e6, 3e6)
    assert parts("zero2") == (2e6, 0.5e6, 3e6)
    assert parts("zero3_offload") == (0, 0, 0)
    assert parts(None) == (6e6, 4e6, 8e6)  # float32 weights with their bfloat16 copy, gradients, two moments
    assert cost.state_bytes(1_000_000, "float32", None, 4).peak == 16e6


def test_activations_with_and_without_checkpointing():
    """A block keeps 6x8 + 2x8 + 2x4 + 4x16 = 136 numbers a token; a checkpoint is the 8 numbers of the stream."""
    assert cost.activation_bytes(SMALL, 10, 2, 2, False) == 2 * 10 * 136 * 2
    assert cost.activation_bytes(SMALL, 10, 2, 4, True) == 2 * 10 * 8 * 4 + 10 * 136 * 2


def test_logits_and_cache():
    assert cost.logit_bytes(SMALL, 10, 2) == 4 * 10 * 32 * 2 + 2 * 10 * 32 * 4
    assert cost.logit_bytes(SMALL, 10_000, 2) == 4 * 10_000 * 32 * 2 + 2 * 4096 * 32 * 4
    assert cost.cache_bytes(SMALL, 3, 100, 2) == 2 * 2 * 4 * 2 * 300  # K and V, 2 layers, 2 heads of 2, bfloat16
    qwen = hardware("paper").models["Qwen/Qwen2.5-1.5B"]
    assert cost.cache_bytes(qwen, 1, 1, 2) == 28_672  # 2 x 28 layers x 256 x 2 bytes


def test_peak_takes_generation_and_training_in_turn():
    memory = cost.Memory(parameters=1, gradients=2, optimizer=3, activations=10, cache=7, engine=5)
    assert memory.peak == 1 + 2 + 3 + 5 + 10


# --- work ---


def test_flops():
    assert cost.training_flops(1_000, 50) == 6 * 1_000 * 50
    assert cost.training_flops(1_000, 50, checkpointing=True) == 8 * 1_000 * 50
    assert cost.forward_flops(1_000, 50) == 2 * 1_000 * 50
    # scores and values, 2 FLOPs each, over half of 10 positions, width 8, in 2 layers
    assert cost.attention_flops(SMALL, 10, 1) == 2 * 2 * (10 / 2) * 8 * 2


def test_a_paper_job_by_hand():
    """SFT of `reasoning`: 200 steps of 64 sequences of 16,384 tokens on 8 cards at 35 % of 989.4 TFLOP/s."""
    found = plan.Plan(Study({"tier": "paper"}))
    job = found.estimate("sft/train/reasoning-pear_token")
    shape = hardware("paper").models["Qwen/Qwen3-1.7B-Base"]
    tokens = 200 * 64 * 16_384
    assert job.tokens == tokens
    flops = 8 * shape.parameters * tokens + 4 * (2 * 16_384 * 2048 * 28) * tokens
    assert job.seconds == pytest.approx(flops / (8 * 989.4e12 * 0.35))
    assert job.memory.optimizer == pytest.approx(12 * shape.parameters / 8)
    logits = 4 * 16_384 * 151_936 * 2 + 2 * 4096 * 151_936 * 4
    blocks = 28 * 16_384 * 2048 * 2 + 16_384 * (6 * 2048 + 2 * 2048 + 2 * 1024 + 4 * 6144) * 2
    assert job.memory.activations == pytest.approx(logits + blocks + 2e9)


def test_grpo_is_rollouts_and_training():
    found = plan.Plan(Study({"tier": "small"}))
    job = found.estimate("rl/grpo/reasoning-sft")
    shape, length = hardware("small").models["Qwen/Qwen2.5-0.5B"], 256 + 512
    tokens = 100 * 64 * length
    assert job.tokens == tokens
    attention = 2 * length * 896 * 24 * tokens
    training = (8 * shape.parameters * tokens + 4 * attention) / (165.2e12 * 0.35)
    rollouts = (2 * shape.parameters * tokens + attention) / (165.2e12 * 0.03)
    assert job.seconds == pytest.approx(training + rollouts)
    assert job.memory.engine == 0


def test_distillation_is_a_student_and_a_forward_pass_of_its_teacher():
    """1.2 B student cut from Qwen1.5-1.8B: 7,630 steps of 256 rows of 1,024 tokens on 8 cards."""
    found = plan.Plan(Study({"tier": "paper"}))
    teacher = hardware("paper").models["Qwen/Qwen1.5-1.8B"]
    shape, tokens = teacher.model_copy(update={"layers": 12}), 7630 * 256 * 1024
    assert found.shape("distill/tail_kd/qwen_1b2-tad") == shape
    alone, tad = (found.estimate(f"distill/tail_kd/qwen_1b2-{arm}") for arm in ("clm", "tad"))
    assert alone.tokens == tad.tokens == tokens
    forward = (2 * teacher.parameters + 2 * 1024 * 2048 * 24) * tokens / (8 * 989.4e12 * 0.35)
    training = (8 * shape.parameters + 4 * 2 * 1024 * 2048 * 12) * tokens / (8 * 989.4e12 * 0.35)
    assert alone.seconds == pytest.approx(training) and tad.seconds == pytest.approx(training + forward)
    assert tad.memory.parameters - alone.memory.parameters == pytest.approx(2 * teacher.parameters)  # bfloat16, not sharded
    rows = 256 // (8 * 4)
    assert tad.memory.activations - alone.memory.activations == pytest.approx(2 * rows * 1024 * teacher.vocab)
    supervised = found.shape("distill/tail_kd/reasoning-tad")
    assert supervised == hardware("paper").models["Qwen/Qwen3-1.7B-Base"]


# --- the table ---


def test_scratch_shapes_come_from_the_configuration():
    found = plan.Plan(Study({"tier": "tiny"}))
    shape = found.shape("rl/grpo/two_style-pear_token")
    assert shape == found.shape("base/scratch/two_style") and shape.vocab == 16  # 14 characters, pad, eos
    assert found.estimate("base/scratch/two_style").seconds is None


@pytest.mark.parametrize("tier", ["tiny", "small", "paper"])
def test_every_tier_has_a_plan_that_fits(tier):
    text = plan.render(plan.Plan(Study({"tier": tier, "seeds": [0, 1]})))
    assert "6 N D" in text and "do not fit" not in text and "above hours" not in text


def test_what_a_job_without_a_seed_reads_is_counted_once():
    """Edits of a pretrained model lie under seed 0; those of a world are read by every seed."""
    jobs = plan.Plan(Study({"tier": "tiny", "seeds": [0, 1, 2]})).jobs()
    assert jobs["edit/pretrained/countries_crisp"] == jobs["edit/factors/countries"] == jobs["data/edits/countries"] == 1
    assert jobs["edit/crispedit/world_crisp"] == jobs["data/edits/world"] == 3


def test_says_which_files_of_the_users_own_are_not_there(monkeypatch, tmp_path):
    study = Study({"tier": "paper"})
    wanted = ("zsre", "zsre10k", "counterfact", "wikibigedit")
    (tmp_path / "data/edit").mkdir(parents=True)
    (tmp_path / "data/edit/zsre10k.json").write_text("[]")
    found = plan.Plan(study)
    monkeypatch.chdir(tmp_path)
    missing = [f"data/edits ({n}): data/edit/{n}.json does not exist; put your edits there" for n in wanted if n != "zsre10k"]
    assert [text.removesuffix(" before the study starts.") for text in plan.absent(found)] == missing


@pytest.mark.parametrize("tier", ["small", "paper"])
def test_counts_the_jobs_that_snakemake_plans(tier):
    if (ROOT / "results" / tier).exists():
        pytest.skip("a dry run lists only what is left to do")
    words = ["-m", "snakemake", "-n", "--cores", "1", "claims", "--config", f"tier={tier}", "seeds=[0,1]"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = {rule: int(n) for rule, n in re.findall(r"^(\w+) +(\d+)$", done.stdout + done.stderr, re.M)}
    expected: dict[str, int] = {}
    for reference, n in plan.Plan(Study({"tier": tier, "seeds": [0, 1]})).jobs().items():
        rule = "_".join(reference.split("/")[:2])
        expected[rule] = expected.get(rule, 0) + n
    assert {rule: counts.get(rule) for rule in expected} == expected


def test_warns_when_a_job_does_not_fit(monkeypatch):
    found = plan.Plan(Study({"tier": "paper"}))
    found.hardware = found.hardware.model_copy(update={"memory_gb": 24.0})
    assert re.search(r"warning: rl/grpo \(games\): \d+\.\d GB do not fit on NVIDIA H100 SXM \(24 GB\)", plan.render(found))


def test_missing_shape_is_one_sentence():
    found = plan.Plan(Study({"tier": "paper"}))
    found.hardware = found.hardware.model_copy(update={"models": {}})
    with pytest.raises(UserError, match=r"hardware.yaml: models has no '.*'; add its shape"):
        plan.render(found)


def test_command_line(capsys):
    assert plan.main(["--tier", "papr"]) == 2
    assert "did you mean 'paper'" in capsys.readouterr().err
    assert plan.main(["--tier", "paper", "--seeds", "x"]) == 2
    assert plan.main(["--tier", "paper", "--seeds", "0,1,2"]) == 0
    assert "seeds [0, 1, 2]" in capsys.readouterr().out


def test_needs_no_torch():
    code = "import sys; from posttrain import plan; plan.main(['--tier', 'paper']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_files_leave_batch_sizes_to_the_trainer(path):
    """Batch sizes are derived in one place, and ZeRO 3 gathers what it saves."""
    options = json.loads(path.read_text())
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        assert options[name] == "auto"
    assert options["bf16"] == {"enabled": "auto"}
    if options["zero_optimization"]["stage"] == 3:
        assert options["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
