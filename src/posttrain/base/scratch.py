"""A small Llama-architecture decoder, trained from scratch on a token mix through the Transformers trainer."""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, determinism, distributed, manifest, models, tables
from posttrain.core.config import key
from posttrain.core.errors import UserError
from posttrain.core.generation import sample
from posttrain.core.tracking import Tracker
from posttrain.core.training import TrainingConfig, arguments, discard_checkpoints, make_callback, save_trained, train
from posttrain.data import chat, verify
from posttrain.data.packed import held_out_loss, rows


class Config(TrainingConfig):
    shape: models.Shape = key(models.Shape(), help="size of the decoder")
    length: int = key(256, help="tokens per packed row", gt=1)
    stop_skill: float | None = key(
        None, help="stop at the first pass@1 of this height on the task's validation items; null: train all steps", gt=0, le=1
    )
    stop_every: int = key(10, help="steps between looks at that skill", gt=0)
    stop_items: int = key(128, help="validation items for that look", gt=1)
    max_new_tokens: int = key(48, help="longest response for that look", gt=0)
    mix: Path = key(help="token mix manifest", role="input")
    tokenizer: Path = key(help="tokenizer manifest", role="input")
    task: Path | None = key(None, help="task manifest, for stop_skill", role="input")

    def model_post_init(self, context) -> None:
        super().model_post_init(context)
        if (self.stop_skill is None) != (self.task is None):
            raise ValueError("stop_skill and task belong together; give both or neither")


def skill(model, tokenizer, items: list[dict], job: Config, style: verify.AnswerStyle) -> float:
    """pass@1 over the items, one sample each at temperature 1. Leaves torch's random state and the mode as they were."""
    import torch

    state, training = torch.random.get_rng_state(), model.training
    prompts = [chat.prompt_ids(tokenizer, item["prompt"]) for item in items]
    drawn = sample(
        model, tokenizer, prompts, count=1, max_new_tokens=job.max_new_tokens, seed=determinism.derive(job.seed, "skill")
    )
    torch.random.set_rng_state(state)
    model.train(training)
    return sum(verify.correct(one.text, item["answer"], style) for item, (one,) in zip(items, drawn, strict=True)) / len(items)


def stop_at_skill(model, tokenizer, job: Config):
    """A callback that ends training once the skill is reached, and remembers it as `.reached`.

    Skill comes suddenly and at another step for each seed, so a fixed number of steps gives a base at chance or at its
    ceiling; a comparison that needs a partially skilled base needs this.
    """
    from transformers import TrainerCallback

    items = tables.read(job.task.parent / "items.parquet", ["prompt", "answer"], [("split", "=", "validation")])[: job.stop_items]
    style = manifest.read(job.task).card["answer_style"]

    class StopAtSkill(TrainerCallback):
        reached: float | None = None
        looked_at = len(items)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % job.stop_every == 0:
                found = skill(model, tokenizer, items, job, style)
                if found >= job.stop_skill:
                    self.reached, control.should_training_stop = found, True

    return StopAtSkill()


def main(job: Config) -> None:
    determinism.setup(job.seed)
    from transformers import Trainer, TrainingArguments

    manifest.read(job.mix)
    manifest.read(job.tokenizer)
    tokenizer = models.load_tokenizer(job.tokenizer)
    args = TrainingArguments(**arguments(job))
    model = models.scratch(job.shape, tokenizer)
    model.config.use_cache = False
    tracker = Tracker(job)
    callback = make_callback(job, tracker)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(job.mix, "train", job.length, tokenizer),
        callbacks=[callback],
    )
    watch = stop_at_skill(model, tokenizer, job) if job.task else None
    if watch:
        trainer.add_callback(watch)
    train(trainer, job, tracker, callback)
    if watch and watch.reached is None:
        raise UserError(
            f"the base of {job.output} did not reach stop_skill {job.stop_skill} within {job.steps} steps; raise steps or "
            "learning_rate, or lower stop_skill."
        )
    files, steps, first = save_trained(trainer, tokenizer, job), trainer.state.global_step, trainer.is_world_process_zero()
    del trainer, model
    distributed.leave()
    if not first:
        return
    model = models.place(models.read(job.folder / "model"))  # what was saved is measured, whole on this process
    loss, count = held_out_loss(model, rows(job.mix, "validation", job.length, tokenizer))
    metrics = {"validation/loss": manifest.Metric(value=loss, n=count), "parameters": model.num_parameters()}
    if watch:
        metrics |= {"skill_at_stop": manifest.Metric(value=watch.reached, n=watch.looked_at), "steps": steps}
    tracker.finish({name: getattr(value, "value", value) for name, value in metrics.items()})
    manifest.publish(job, metrics, [*files, tracker.path])
    discard_checkpoints(job)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
