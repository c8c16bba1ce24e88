"""`make plan`: jobs, memory per card, tokens and GPU-hours of a tier, from its configuration alone.

Needs no GPU, no network and no torch. The formulas are in `cost.py` and printed below the table; the card and the shapes
of hub models stand in configs/<tier>/hardware.yaml. Figures are upper bounds: every response is as long as allowed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.core import config as configs
from posttrain.core.config import JobConfig, Model, key
from posttrain.core.errors import UserError
from posttrain.core.methods import Resources
from posttrain.core.models import Shape
from posttrain.core.training import TrainingConfig
from posttrain.cost import (
    FORMULAS,
    Architecture,
    Memory,
    attention_flops,
    cache_bytes,
    forward_flops,
    training_flops,
    training_memory,
    zero,
)
from posttrain.study import STAGES, Study, methods, settings_named

GB = 1e9
OVERHEAD_LENGTH = 512  # where sft/overhead.py cuts its traces


class Utilisation(Model):
    """Shares of the card's peak that the plan assumes; recomputed activations count as work."""

    train: float = key(help="forward and backward", gt=0, le=1)
    forward: float = key(help="scoring", gt=0, le=1)
    vllm: float = key(help="rollouts with vLLM", gt=0, le=1)
    generate: float = key(help="model.generate of Transformers", gt=0, le=1)


class Hardware(Model):
    """configs/<tier>/hardware.yaml."""

    card: str = key(help="name of the card")
    memory_gb: float = key(help="its memory in 10^9 bytes", gt=0)
    peak_tflops: float | None = key(None, help="dense bfloat16 peak; null: no times are estimated", gt=0)
    peak_tflops_float32: float | None = key(None, help="float32 peak without tensor cores", gt=0)
    utilisation: Utilisation | None = key(None, help="needed with peak_tflops")
    vllm_share: float = key(0.3, help="TRL's vllm_gpu_memory_utilization", ge=0, le=1)
    prompt_tokens: int = key(help="tokens of a rendered prompt", gt=0)
    models: dict[str, Architecture] = key({}, help="hub id, or base/packaged/<name>, -> shape")

    def model_post_init(self, _context) -> None:
        if self.peak_tflops and not (self.utilisation and self.peak_tflops_float32):
            raise ValueError("peak_tflops needs utilisation and peak_tflops_float32; add them")


@dataclass(frozen=True)
class Estimate:
    """One job: memory of a card, tokens that pass through a model, seconds on the job's cards (None: not estimated)."""

    memory: Memory
    tokens: float
    seconds: float | None


# --- a tier ---------------------------------------------------------------------------------------------------


class Plan:
    """Estimates for the jobs of `snakemake all` of one study."""

    def __init__(self, study: Study) -> None:
        self.study = study
        path = study.folder / "hardware.yaml"
        self.hardware: Hardware = configs.validate(Hardware, configs.read_yaml(path), str(path))

    def inputs(self, reference: str) -> dict[str, Any]:
        """{input key: reference, or several by name} of a job."""
        stage, method, variant = reference.split("/")
        return self.study.references(stage, method, variant.split("-"))

    def jobs(self) -> dict[str, int]:
        """{reference: jobs} of everything that `all` builds, seeds counted, in the order of the stages."""
        queue = [(reference, frozenset(self.study.seeds)) for reference in self.study.measurements()]
        seen: dict[str, set[int]] = {}
        while queue:
            reference, seeds = queue.pop()
            stage, method, _ = reference.split("/")
            seeds = seeds if methods(stage)[method].seeded else frozenset([0])
            if seeds <= seen.setdefault(reference, set()):
                continue
            seen[reference] |= seeds
            for value in self.inputs(reference).values():  # what a job without a seed reads, it reads of seed 0
                queue += [(one, seeds) for one in (value.values() if isinstance(value, dict) else [value])]
        order = [f"{stage}/{method}" for stage in STAGES for method in methods(stage)]
        return {r: len(seen[r]) for r in sorted(seen, key=lambda r: (order.index(r.rpartition("/")[0]), r))}

    def job(self, reference: str) -> JobConfig:
        stage, method, variant = reference.split("/")
        return self.study.config(stage, method, variant.split("-"), seed=0, inputs={}, placeholder=True)

    def shape(self, reference: str) -> Architecture:
        """Shape of the model that a job writes."""
        stage, method, _ = reference.split("/")
        if stage != "base":
            inputs, job = self.inputs(reference), self.job(reference)
            if stage == "distill" and job.shape:  # a student from scratch, or cut from its teacher
                teacher = self.shape(inputs["teacher"])
                groups = teacher.heads // teacher.kv_heads if job.student == "cut" else 1
                own = job.shape.model_dump(exclude={"context"}) | {"kv_heads": job.shape.heads // groups}
                like = {"tied": True, "bias": False, "qk_norm": False} if job.student == "scratch" else {}
                return teacher.model_copy(update=own | {"head_dim": None} | like)
            return self.shape(inputs["start"] if "start" in inputs else inputs["model"])
        if method == "scratch":
            shape: Shape = self.job(reference).shape
            tokenizer = self.job(self.inputs(reference)["tokenizer"])
            vocab = (
                len(set(tokenizer.alphabet)) + len(tokenizer.tokens) + 2
                if tokenizer.kind == "characters"
                else tokenizer.vocabulary
            )
            sizes = shape.model_dump(exclude={"context"})
            return Architecture(**sizes, kv_heads=shape.heads, vocab=vocab)
        name = self.job(reference).repo if method == "hub" else reference
        if name not in self.hardware.models:
            raise UserError(
                f"{self.study.folder}/hardware.yaml: models has no '{name}'; add its shape from its public config.json."
            )
        return self.hardware.models[name]

    def trace_length(self, reference: str) -> int:
        """Longest prompt and response of stored traces; for a data set, where training cuts them."""
        job = self.job(reference)
        if job.source == "policy":
            return self.hardware.prompt_tokens + self.job(self.inputs(reference)["task"]).digits + 4
        if job.source == "teacher":
            return self.hardware.prompt_tokens + job.max_new_tokens
        readers = [f"sft/train/{task}-{self.study.arms[0]}" for task in self.study.tasks]
        lengths = [self.job(r).max_length for r in readers if self.inputs(r)["traces"] == reference]
        return max(lengths, default=self.hardware.prompt_tokens)

    def seconds(self, flops: float, kind: str, cards: int, precision: str = "bfloat16") -> float | None:
        """kind: a field of Utilisation."""
        peak = self.hardware.peak_tflops if precision == "bfloat16" else self.hardware.peak_tflops_float32
        return flops / (cards * peak * 1e12 * getattr(self.hardware.utilisation, kind)) if peak else None

    def estimate(self, reference: str) -> Estimate | None:
        """None for a job that runs no model."""
        stage, method, _ = reference.split("/")
        estimator = getattr(self, f"_{stage}_{method}", None)
        resources = self.study.resources(stage, method)
        return estimator(reference, self.job(reference), max(1, resources.nodes * resources.gpus)) if estimator else None

    def _train(self, shape: Architecture, job: TrainingConfig, cards: int, length: int, tokens: float) -> float | None:
        passes = 4 if job.gradient_checkpointing else 3
        flops = training_flops(shape.parameters, tokens, job.gradient_checkpointing) + passes * attention_flops(
            shape, length, tokens
        )
        return self.seconds(flops, "train", cards, job.precision)

    def _forward(self, shape: Architecture, length: int, tokens: float, kind: str, cards: int = 1, precision: str = "bfloat16"):
        return self.seconds(
            forward_flops(shape.parameters, tokens) + attention_flops(shape, length, tokens), kind, cards, precision
        )

    def _base_scratch(self, reference: str, job: Any, cards: int) -> Estimate:
        shape, tokens = self.shape(reference), job.steps * job.batch_size * job.length
        memory = training_memory(shape, job, cards, job.length, job.length)
        return Estimate(memory, tokens, self._train(shape, job, cards, job.length, tokens))

    def _midtrain_prism(self, reference: str, job: Any, cards: int) -> Estimate:
        return self._base_scratch(reference, job, cards)  # all tokens are targets, too

    def _distill_tail_kd(self, reference: str, job: Any, cards: int) -> Estimate:
        inputs, shape = self.inputs(reference), self.shape(reference)
        teacher = self.shape(inputs["teacher"])
        length = min(job.length, self.trace_length(inputs["traces"])) if "traces" in inputs else job.length
        tokens = job.steps * job.batch_size * length
        memory, seconds = training_memory(shape, job, cards, length, length), self._train(shape, job, cards, length, tokens)
        if job.divergence.kind != "none" and "statistics" not in inputs:  # the teacher, whole on every card
            width = 2 if job.teacher_dtype == "bfloat16" else 4
            rows = max(1, job.batch_size // (cards * job.accumulation))
            logits = rows * length * teacher.vocab * width
            memory = replace(
                memory,
                parameters=memory.parameters + width * teacher.parameters,
                activations=memory.activations + logits,
            )
            forward = self._forward(teacher, length, tokens, "forward", cards, job.teacher_dtype)
            seconds = seconds + forward if seconds and forward else None
        return Estimate(memory, tokens, seconds)

    def _sft_train(self, reference: str, job: Any, cards: int) -> Estimate:
        shape, length = self.shape(reference), min(job.max_length, self.trace_length(self.inputs(reference)["traces"]))
        tokens = job.steps * job.batch_size * length
        return Estimate(
            training_memory(shape, job, cards, length, length), tokens, self._train(shape, job, cards, length, tokens)
        )

    def _sft_overhead(self, reference: str, job: Any, cards: int) -> Estimate:
        shape, length = self.shape(reference), min(OVERHEAD_LENGTH, self.trace_length(self.inputs(reference)["traces"]))
        tokens = (job.warmup_batches + job.repeats) * 4 * job.batch_size * length  # sft and three levels
        return Estimate(
            training_memory(shape, job, cards, length, length), tokens, self._train(shape, job, cards, length, tokens)
        )

    def _sft_traces(self, reference: str, job: Any, cards: int) -> Estimate | None:
        if job.source == "policy":
            return None
        shape, length = self.shape(self.inputs(reference)["teacher"]), self.trace_length(reference)
        tokens = (job.train + job.validation) * length
        seconds, cache = self._forward(shape, length, tokens, "forward", precision="float32"), 0.0
        if job.source == "teacher":
            sampling = self._forward(shape, length, tokens, "generate")
            seconds = seconds + sampling if sampling else None
            cache = cache_bytes(shape, min(job.batch, job.train), length, 4)
        return Estimate(Memory(4 * shape.parameters, activations=2 * length * shape.vocab * 4, cache=cache), tokens, seconds)

    def _rl_grpo(self, reference: str, job: Any, cards: int) -> Estimate:
        shape, length = self.shape(reference), self.hardware.prompt_tokens + job.max_new_tokens
        tokens = job.steps * job.batch_size * length
        width = 2 if job.deepspeed and job.precision == "bfloat16" else 4
        memory = training_memory(shape, job, cards, length, job.max_new_tokens)
        rollouts = 0 if job.vllm else cache_bytes(shape, job.batch_size // cards, length, width)
        engine = self.hardware.vllm_share * self.hardware.memory_gb * GB if job.vllm else 0
        sharded = cards if zero(job.deepspeed)[0] == 3 else 1  # TRL prepares the reference as it does the policy
        reference_model = 4 * shape.parameters / sharded if job.beta else 0
        memory = replace(memory, parameters=memory.parameters + reference_model, cache=rollouts, engine=engine)
        # when the trainer is gone, its result and the start are compared, both in float32 on one card
        after = 8 * shape.parameters + cache_bytes(shape, job.kl_prompts, length, 4)
        memory = replace(memory, cache=max(rollouts, after - (memory.peak - max(memory.activations, memory.cache))))
        parts = [
            self._train(shape, job, cards, length, tokens),
            self._forward(shape, length, tokens / job.iterations, "vllm" if job.vllm else "generate", cards),
            *[self._forward(shape, length, tokens, "forward", cards, job.precision)] * (job.vllm + (job.beta > 0)),
        ]
        return Estimate(memory, tokens, sum(parts) if self.hardware.peak_tflops else None)

    def _evaluate_reasoning(self, reference: str, job: Any, cards: int) -> Estimate:
        shape, length = self.shape(self.inputs(reference)["model"]), self.hardware.prompt_tokens + job.max_new_tokens
        tokens, width = job.items * job.samples * length, 2 if job.dtype == "bfloat16" else 4
        cache = cache_bytes(shape, min(job.batch, job.items * job.samples), length, width)
        memory = Memory(width * shape.parameters, activations=2 * job.batch * shape.vocab * 4, cache=cache)
        return Estimate(memory, tokens, self._forward(shape, length, tokens, "generate"))

    def _evaluate_retention(self, reference: str, job: Any, cards: int) -> Estimate:
        shape, tokens = self.shape(self.inputs(reference)["model"]), job.documents * job.tokens
        width = 2 if job.dtype == "bfloat16" else 4
        memory = Memory(width * shape.parameters, activations=2 * job.batch * job.tokens * shape.vocab * width)
        return Estimate(memory, tokens, self._forward(shape, job.tokens, tokens, "forward", precision=job.dtype))


# --- the table ------------------------------------------------------------------------------------------------

HEAD = "job,of,jobs,nodes x GPUs,params,grads,optim.,activ.,cache,engine,peak GB,tokens,h each,GPU-h"
COLUMNS = HEAD.split(",")


def shown(value: float) -> str:
    """Three decimals below 0.1, one above; a plain 0 for nothing."""
    return "0" if value == 0 else f"{value:.3f}" if value < 0.1 else f"{value:.1f}"


def grouped(plan: Plan) -> dict[tuple[str, str], tuple[int, Estimate | None]]:
    """{(stage/method, first axis value): (jobs, estimate of each)}; jobs that run no model are one group a method."""
    groups: dict[tuple[str, str], tuple[int, Estimate | None]] = {}
    for reference, count in plan.jobs().items():
        kind, _, variant = reference.rpartition("/")
        found = plan.estimate(reference)
        name = (kind, variant.split("-")[0] if found else "")
        groups[name] = (groups.get(name, (0, None))[0] + count, found)
    return groups


def warnings(plan: Plan, kind: str, of: str, found: Estimate, resources: Resources) -> list[str]:
    """What in a group will not fit: memory on a card, time in the first attempt."""
    card, peak, result = plan.hardware, found.memory.peak / GB, []
    if peak > card.memory_gb:
        advice = "raise gpus or accumulation, or lower batch or length"
        result.append(f"{kind} ({of}): {peak:.1f} GB do not fit on {card.card} ({card.memory_gb:g} GB); {advice}.")
    elif peak > 0.9 * card.memory_gb:
        result.append(f"{kind} ({of}): {peak:.1f} GB leave less than a tenth of {card.card} for what is not counted.")
    if found.seconds is not None and resources.gpus and found.seconds > 3600 * resources.hours:
        result.append(f"{kind} ({of}): {found.seconds / 3600:.1f} h a job, above hours: {resources.hours:g} of a first attempt.")
    return result


def absent(plan: Plan) -> list[str]:
    """Files of a user's own that the tier names and that are not there yet."""
    study, found = plan.study, []
    for name in study.names("data", "edits", "edits"):
        job = study.config("data", "edits", (name,), seed=0, inputs={}, placeholder=True)
        if job.file and not Path(job.file).is_file():
            found.append(f"data/edits ({name}): {job.file} does not exist; put your edits there before the study starts.")
    return found


def table(plan: Plan) -> tuple[list[list[str]], float, list[str]]:
    """Rows of text under COLUMNS, GPU-hours in all, and warnings."""
    rows, total, notes = [], 0.0, absent(plan)
    for (kind, of), (count, found) in grouped(plan).items():
        resources = plan.study.resources(*kind.split("/"))
        cards = resources.nodes * resources.gpus
        row = [kind, of, str(count), f"{resources.nodes} x {resources.gpus}" if cards else "CPU"]
        if found:
            m = found.memory
            parts = (m.parameters, m.gradients, m.optimizer, m.activations, m.cache, m.engine, m.peak)
            row += [*(shown(part / GB) for part in parts), f"{found.tokens * count:.2e}"]
            hours = None if found.seconds is None or not cards else found.seconds / 3600
            row += ["-", "-"] if hours is None else [shown(hours), shown(hours * cards * count)]
            total += (hours or 0) * cards * count
            notes += warnings(plan, kind, of, found, resources)
        rows.append(row + [""] * (len(COLUMNS) - len(row)))
    return rows, total, notes


def render(plan: Plan) -> str:
    """What `make plan` prints."""
    rows, total, notes = table(plan)
    widths = [max(len(line[i]) for line in [COLUMNS, *rows]) for i in range(len(COLUMNS))]

    def line(cells: Sequence[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        return "  ".join([*left, *(c.rjust(w) for c, w in zip(cells[2:], widths[2:], strict=True))]).rstrip()

    hardware, study = plan.hardware, plan.study
    used = hardware.utilisation
    rates = ", ".join(f"{name} {value:g}" for name, value in used.model_dump().items()) if used else ""
    peak = f"{hardware.peak_tflops:g} TFLOP/s bfloat16" if hardware.peak_tflops else "no times: no peak is stated"
    return "\n".join(
        [
            f"Plan of tier {study.tier}, seeds {study.seeds}: upper bounds, every response as long as allowed.",
            f"Card: {hardware.card}, {hardware.memory_gb:g} GB, {peak}. Memory in GB on one card.",
            *([f"Assumed shares of the peak: {rates}."] if used else []),
            "",
            line(COLUMNS),
            line(["-" * width for width in widths]),
            *map(line, rows),
            "",
            f"{sum(int(row[2]) for row in rows)} jobs and the report's"
            + (f", {total:.0f} GPU-hours at most" if hardware.peak_tflops else ""),
            *[f"warning: {text}" for text in notes],
            "",
            FORMULAS,
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m posttrain.plan", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tier", required=True, help="folder of configs/")
    parser.add_argument("--seeds", help="for example 0,1,2; default: configs/config.yaml")
    given = parser.parse_args(arguments)
    try:
        print(render(Plan(Study(settings_named(given.tier, given.seeds)))))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
