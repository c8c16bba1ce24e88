"""GRPO through TRL: hand-computed losses, groups without variance, the same prompts for every start, resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from posttrain.core import manifest, models, tables
from posttrain.core.errors import TimeLimitReached
from posttrain.rl import grpo
from posttrain.rl.rewards import exact_answer


def job(world, folder: Path, **options) -> grpo.Config:
    output = folder / "rl" / "grpo" / "two_style-base" / "seed0" / "manifest.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    defaults = {
        "steps": 3,
        "batch_size": 16,
        "generations": 4,
        "max_new_tokens": 10,
        "start": world.base,
        "task": world.task,
        "learning_rate": 1e-3,
        "warmup": 0.0,
        "kl_prompts": 4,
    }
    return grpo.Config(output=output, **(defaults | options))


def items(world, count=32):
    return tables.read(world.task.parent / "items.parquet", ["prompt", "answer"], [("split", "=", "train")])[:count]


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# Two prompts with four samples each. Rewards 1,0,0,0 and 1,1,0,0; standard deviations with n - 1.
REWARDS = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]])
LENGTHS = [2, 1, 3, 4, 4, 2, 1, 3]


def advantages() -> torch.Tensor:
    centred = REWARDS - REWARDS.mean(1, keepdim=True)
    return (centred / (REWARDS.std(1, keepdim=True) + 1e-4)).flatten()


def hand_inputs(trainer, lengths, shift):
    """A batch of 8 completions; `shift` is log(pi / pi_old) at every token of completion 0 (the others: 0)."""
    width = max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    prompt = torch.tensor([[2, 3, 4, 5, 6, 12]]).repeat(8, 1)
    completion = torch.full((8, width), 3)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, torch.cat([prompt, completion], 1), torch.cat([torch.ones_like(prompt), mask], 1), width
    )
    old = logps.detach().clone()
    old[0] -= shift
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": advantages(),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("lengths", [LENGTHS, [2 * LENGTHS[0], *LENGTHS[1:]]])
@pytest.mark.parametrize("shift", [0.0, math.log(1.5), math.log(0.5)])
def test_loss_equals_the_formula(world, tmp_path, loss_type, lengths, shift):
    config = job(world, tmp_path, loss_type=loss_type, batch_size=8)
    tokenizer = models.load_tokenizer(world.base)
    trainer = grpo.make_trainer(config, items(world), tokenizer, [], [])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    value = trainer._compute_loss(trainer.model, hand_inputs(trainer, lengths, shift)).item()
    a, ratio = advantages().tolist(), math.exp(shift)
    # Completion 0 has a positive advantage: min(r A, clip(r) A) = A min(r, 1.2). All others have ratio 1.
    per_token = [-a[0] * min(ratio, 1.2)] + [-x for x in a[1:]]
    total = sum(loss * n for loss, n in zip(per_token, lengths, strict=True))
    expected = {
        "grpo": sum(per_token) / 8,
        "bnpo": total / sum(lengths),
        "dapo": total / sum(lengths),
        "dr_grpo": total / (8 * config.max_new_tokens),
    }[loss_type]
    assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_groups_without_variance_leave_the_weights_bit_identical(world, tmp_path):
    config = job(world, tmp_path)
    tokenizer = models.load_tokenizer(world.base)
    unreachable = [{**item, "answer": "999"} for item in items(world)]
    trainer = grpo.make_trainer(config, unreachable, tokenizer, [], [])
    before = weights(trainer.model)
    trainer.train()
    assert torch.equal(weights(trainer.model), before)
    shares = [line["frac_reward_zero_std"] for line in trainer.state.log_history if "frac_reward_zero_std" in line]
    assert shares and set(shares) == {1.0}
    assert all(math.isfinite(line["loss"]) for line in trainer.state.log_history if "loss" in line)


def test_prompts_do_not_depend_on_the_start(world, tmp_path):
    from posttrain.core import determinism

    def prompts_from(noise: float) -> list[list[str]]:
        determinism.setup(0)
        kept: list[dict] = []
        trainer = grpo.make_trainer(job(world, tmp_path / str(noise)), items(world), models.load_tokenizer(world.base), [], kept)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1 + noise)
        seen, reward = [], trainer.reward_funcs[0]

        def watched(*arguments, **keywords):
            values = reward(*arguments, **keywords)
            seen.append([row["prompt"] for row in kept])
            return values

        trainer.reward_funcs[0] = watched
        trainer.train()
        return seen

    first, second = prompts_from(0.0), prompts_from(0.3)
    assert len(first) == 3 and first == second


def test_reward_is_strict_and_knows_both_forms():
    reward = exact_answer("hash")
    texts = ["a12345#5", "#5", "a1#5#5", "5", "#5 apples", "a1#05", "#"]
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    prompts = [[{"role": "user", "content": "p"}]] * len(texts)
    assert reward(prompts, texts, answer=["5"] * len(texts)) == expected
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert reward(prompts, chats, answer=["5"] * len(texts)) == expected
    with pytest.raises(ValueError, match="gold answer is empty"):
        reward(prompts[:1], texts[:1], answer=[" "])


def test_same_run_twice_and_resume_are_bit_identical(world, tmp_path):
    def run(name, **options):
        config = job(world, tmp_path / name, checkpoint_every=1, **options)
        grpo.main(config)
        return config

    first, second = run("a"), run("b")
    assert first.output.read_bytes() == second.output.read_bytes()
    with pytest.raises(TimeLimitReached):
        run("c", max_minutes=1e-9)
    third = run("c")
    steps = [json.loads(line)["step"] for line in (third.folder / "history.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    found = manifest.read(third.output)
    assert found.artifacts["model/model.safetensors"] == manifest.read(first.output).artifacts["model/model.safetensors"]
    assert third.output.read_bytes() == first.output.read_bytes()


def test_metrics_and_rollouts(world, tmp_path):
    config = job(world, tmp_path)
    grpo.main(config)
    found = manifest.read(config.output)
    assert {
        "kl_to_start",
        "mean/reward",
        "mean/reward_std",
        "mean/frac_reward_zero_std",
        "mean/entropy",
        "mean/completions/mean_length",
        "mean/clip_ratio/region_mean",
    } <= found.metrics.keys()
    rows = tables.read(config.folder / "rollouts.parquet")
    assert {"prompt", "completion", "answer", "reward"} == rows[0].keys() and len(rows) == 16


def test_kl_to_start_is_zero_for_the_start_itself(world, tmp_path):
    config, tokenizer = job(world, tmp_path), models.load_tokenizer(world.base)
    model = models.load(world.base)
    prompts = [tokenizer("12345=")["input_ids"], tokenizer("54321=")["input_ids"]]
    assert grpo.kl_to_start(model, models.load(world.base), tokenizer, prompts, config).value == 0.0


def test_batch_and_generations_must_fit(world, tmp_path):
    with pytest.raises(ValueError, match="batch_size 10 is not a multiple of generations 4"):
        job(world, tmp_path, batch_size=10)


def test_trainer_and_sampler_agree_on_log_probabilities_at_another_temperature(world, tmp_path):
    """GRPO's ratio is right only if the trainer divides logits by the sampler's temperature, as our own function does."""
    from posttrain.core.logprobs import token_logprobs

    config = job(world, tmp_path, temperature=0.7, batch_size=8)
    trainer = grpo.make_trainer(config, items(world), models.load_tokenizer(world.base), [], [])
    assert (trainer.args.top_p, trainer.args.top_k, trainer.args.min_p) == (1.0, 0, None)  # a truncating sampler biases the ratio
    ids = torch.tensor([[2, 3, 4, 5, 6, 12, 13, 3, 4]])
    theirs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 3)
    with torch.no_grad():
        logits = trainer.model(ids).logits[:, 5:-1]
    ours = token_logprobs(logits, ids[:, 6:], temperature=0.7)
    assert (theirs - ours).abs().max() < 1e-5
    assert (theirs - token_logprobs(logits, ids[:, 6:])).abs().max() > 1e-3


def test_a_job_learns_from_training_prompts_alone(world, tmp_path):
    config = job(world, tmp_path)
    grpo.main(config)
    splits = {row["prompt"]: row["split"] for row in tables.read(world.task.parent / "items.parquet")}
    rows = tables.read(config.folder / "rollouts.parquet")
    assert {splits[row["prompt"]] for row in rows} == {"train"}


def test_recipe_reaches_the_trainer(world, tmp_path):
    """Each key of the recipe is what the trainer runs with, at values that are not the defaults of either side."""
    config = job(world, tmp_path, temperature=0.8, epsilon=0.15, iterations=2, loss_type="bnpo", scale_rewards="none", beta=0.04)
    args = grpo.make_trainer(config, items(world), models.load_tokenizer(world.base), [], []).args
    found = (args.temperature, args.epsilon, args.num_iterations, args.loss_type, args.scale_rewards, args.beta)
    assert found == (0.8, 0.15, 2, "bnpo", "none", 0.04)
    assert (args.num_generations, args.max_completion_length, args.per_device_train_batch_size) == (4, 10, 16)


def test_kl_to_start_is_the_divergence_of_the_result_from_the_start(world, tmp_path):
    """Against the exact KL(result || start) of one-token responses: the sign, the direction and the value."""
    config, tokenizer = job(world, tmp_path, max_new_tokens=1), models.load_tokenizer(world.base)
    start, result = models.load(world.base), models.load(world.base)
    with torch.no_grad():
        for p in result.parameters():
            p.mul_(1.5)
    prompt = tokenizer("12345=")["input_ids"]
    with torch.inference_mode():
        logp, logq = (m(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1) for m in (result, start))
    exact = (logp.exp() * (logp - logq)).sum().item()
    other = (logq.exp() * (logq - logp)).sum().item()
    found = grpo.kl_to_start(result, start, tokenizer, [prompt] * 2000, config)
    assert found.value == pytest.approx(exact, abs=4 * found.se) and found.value > 0
    assert abs(found.value - other) > 4 * found.se
