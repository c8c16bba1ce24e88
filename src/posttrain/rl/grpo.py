"""GRPO with a verifiable reward (TRL), from any checkpoint of the DAG, with the same recipe for every start.

Prompts, their order, the rollout budget and the seeds depend on the task and the study's seed, never on the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from posttrain.core import cli, determinism, distributed, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.core.tracking import Tracker, read_history
from posttrain.core.training import (
    TrainingConfig,
    arguments,
    checkpoint_folder,
    discard_checkpoints,
    make_callback,
    save_trained,
    train,
)
from posttrain.data import chat, verify
from posttrain.data.items import take
from posttrain.rl.rewards import RewardLog, exact_answer

CURVES = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "completions/mean_length", "clip_ratio/region_mean")


class Config(TrainingConfig):
    generations: int = key(8, help="completions per prompt (G)", gt=1)
    max_new_tokens: int = key(48, help="longest completion", gt=0)
    temperature: float = key(1.0, help="sampling temperature; log-probabilities use the same", gt=0)
    epsilon: float = key(0.2, help="clip range of the ratio", gt=0)
    beta: float = key(0.0, help="weight of the KL to the start; 0: no reference model", ge=0)
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo"] = key("dapo", help="normalisation over tokens (TRL's names)")
    scale_rewards: Literal["group", "batch", "none"] = key("group", help="what the advantage is divided by")
    iterations: int = key(1, help="optimizer passes per batch of rollouts", gt=0)
    answer_style: verify.AnswerStyle = key("hash", help="how the answer is marked in a completion")
    prompts: int = key(4000, help="training prompts to draw from", gt=0)
    families: tuple[str, ...] = key((), help="draw prompts of these families alone, in equal shares; empty: all items")
    pass_counts: tuple[int, int] | None = key(None, help="keep prompts with so many right samples (lowest, highest) in passes")
    vllm: bool = key(False, help="generate with vLLM in the trainer's processes (GPU)")
    kl_prompts: int = key(64, help="prompts for the estimate of KL(result || start)", gt=0)
    start: Path = key(help="manifest of the model to start from", role="input")
    task: Path = key(help="task manifest", role="input")
    passes: Path | None = key(None, help="pass counts of the prompts (rl/passes), for pass_counts", role="input")

    def model_post_init(self, context) -> None:
        super().model_post_init(context)
        if self.batch_size % self.generations:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of generations {self.generations}; change one of them"
            )
        if (self.passes is None) != (self.pass_counts is None):
            raise ValueError("passes and pass_counts belong together; give both or neither")


def kl_to_start(model, start, tokenizer, prompts: list[list[int]], job: Config) -> manifest.Metric:
    """Monte-Carlo estimate of KL(result || start) per response in nats: mean of log pi - log pi_start over own samples."""
    import torch

    from posttrain.core.generation import sample
    from posttrain.core.logprobs import token_logprobs

    drawn = sample(model, tokenizer, prompts, count=1, max_new_tokens=job.max_new_tokens, seed=derive(job.seed, "kl"))
    values = []
    with torch.inference_mode():
        for prompt, (one,) in zip(prompts, drawn, strict=True):
            ids = torch.tensor([prompt + one.ids], device=model.device)
            gap = 0.0
            for sign, policy in ((1, model), (-1, start)):
                logits = policy(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                gap += sign * token_logprobs(logits, ids[0, len(prompt) :]).sum().item()
            values.append(gap)
    return manifest.metric(values)


def training_items(job: Config) -> list[dict]:
    """Rows {id, family, prompt, answer} of the train split that RL draws from.

    With pass_counts only prompts whose number of right samples lies in it are kept; with families equally many of each,
    those of a small family several times, so that the mix is that of the configuration.
    """
    items = tables.read(job.task.parent / "items.parquet", ["id", "family", "prompt", "answer"], [("split", "=", "train")])
    if job.passes:
        manifest.read(job.passes)
        low, high = job.pass_counts
        rows = tables.read(job.passes.parent / "passes.parquet", ["id", "correct"])
        kept = {row["id"] for row in rows if low <= row["correct"] <= high}
        items = [item for item in items if item["id"] in kept]
        if not items:
            raise UserError(f"pass_counts = [{low}, {high}]: no prompt of {job.passes} has so many right samples; widen it.")
    return take(items, job.families, job.prompts, repeat=True)


def make_trainer(job: Config, items: list[dict], tokenizer, callbacks: list, rollouts: list[dict], log: RewardLog | None = None):
    """TRL's GRPOTrainer with this recipe. items: rows {prompt, answer} and what else the reward may see; rollouts receives
    the latest completions, log the rewards of all."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = {
        "num_generations": job.generations,
        "max_completion_length": job.max_new_tokens,
        "temperature": job.temperature,
        "epsilon": job.epsilon,
        "beta": job.beta,
        "loss_type": job.loss_type,
        "scale_rewards": job.scale_rewards,
        "num_iterations": job.iterations,
        "use_vllm": job.vllm,
        "shuffle_dataset": True,
        "model_init_kwargs": {"dtype": "float32", "trust_remote_code": False},
    }
    return GRPOTrainer(
        model=str(models.model_folder(job.start)),  # a path: with beta > 0 TRL loads the reference from the same place
        reward_funcs=exact_answer(job.answer_style, rollouts, log),
        args=GRPOConfig(**arguments(job, **options)),
        train_dataset=Dataset.from_list([{**i, "prompt": chat.prompt_messages(i["prompt"])} for i in items]),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def main(job: Config) -> None:
    determinism.setup(job.seed)
    manifest.read(job.task)
    tokenizer = models.load_tokenizer(job.start)
    tokenizer.padding_side = "left"
    items = training_items(job)
    tracker = Tracker(job)
    # rank 0's share of the prompts; among the checkpoints, so that another configuration does not take it up
    log = RewardLog(checkpoint_folder(job) / "rewards.jsonl") if tracker.rank0 else None
    callback = make_callback(job, tracker)
    rollouts: list[dict] = []
    trainer = make_trainer(job, items, tokenizer, [callback], rollouts, log)
    train(trainer, job, tracker, callback)
    files = save_trained(trainer, tokenizer, job)
    first = trainer.is_world_process_zero()
    del trainer
    distributed.leave()
    if not first:
        return
    model = models.place(models.read(job.folder / "model"))  # what was saved is measured, whole on this process
    history = read_history(tracker.path)
    some = take(items, job.families, max(job.kl_prompts, len(job.families)))
    prompts = [chat.prompt_ids(tokenizer, item["prompt"]) for item in some]
    metrics = {"kl_to_start": kl_to_start(model, models.load(job.start).to(model.device), tokenizer, prompts, job)}
    last = max(1, len(history) // 10)
    for name in CURVES:
        values = [line[name] for line in history if name in line]
        if values:
            metrics[f"mean/{name}"] = sum(values) / len(values)
            metrics[f"last_tenth/{name}"] = sum(values[-last:]) / last
    if rollouts:
        files.append(tables.write(rollouts[: 4 * job.generations], job.folder / "rollouts.parquet"))
    files.append(tables.write(log.rows(), job.folder / "rewards.parquet"))
    tracker.finish({name: getattr(value, "value", value) for name, value in metrics.items()})
    manifest.publish(job, metrics, [*files, tracker.path])
    discard_checkpoints(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
