"""From `configs/` to jobs: which jobs a study has, what each reads, its flags, its resources.

The workflow's only door to the package. It validates every block of a tier before the DAG is built, in milliseconds and
without torch. References between jobs are written `<stage>/<method>/<variant>` in the YAML.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from posttrain.core import config as configs
from posttrain.core import tracking
from posttrain.core.codes import code_digest
from posttrain.core.config import JobConfig, Model, key
from posttrain.core.errors import UserError, nearest
from posttrain.core.manifest import NAME, sha256
from posttrain.core.methods import Method, Resources

STAGES = ("data", "base", "midtrain", "sft", "rl", "distill", "edit", "evaluate", "report")
REVISIONS = "revisions.yaml"  # of a tier: {hub repo: commit}, written by `make pin`, fills a revision that a block leaves out


class Tracking(Model):
    mode: Literal["disabled", "offline", "online"] = key("disabled", help="offline needs no account, online a key")
    project: str = key("posttrain", help="W&B project")
    entity: str | None = key(None, help="W&B team or user; null: your default")
    epoch: int = key(0, help="raise after deleting runs on the server: a deleted run id cannot be used again", ge=0)


class Settings(Model):
    """configs/config.yaml."""

    tier: str = key("tiny", help="folder of configs/ to take", pattern="^[a-z0-9_]+$")
    seeds: list[typing.Annotated[int, Field(ge=0)]] = key([0], help="seeds of the study", min_length=1)
    wandb: Tracking = key(Tracking(), help="experiment tracking")


@functools.cache
def methods(stage: str) -> dict[str, Method]:
    return importlib.import_module(f"posttrain.{stage}").METHODS


def config_class(stage: str, method: str) -> type[JobConfig]:
    return importlib.import_module(f"posttrain.{stage}.{method}").Config


@functools.cache
def block_model(stage: str, method: str) -> type[Model]:
    """What `defaults` or one axis value may hold: settings, runtime keys, and references for inputs."""
    import copy

    owner = config_class(stage, method)
    model = configs.partial(owner)
    references = {}
    for name, role in configs.roles(owner).items():
        if role == "input":
            field = copy.copy(owner.model_fields[name])
            field.default = None
            several = typing.get_origin(owner.model_fields[name].annotation) is dict
            references[name] = (dict[str, str] | None if several else str | None, field)
    return create_model(f"{stage}_{method}_block", __base__=model, **references)


@functools.cache
def section_model(stage: str, method: str) -> type[Model]:
    block = block_model(stage, method)
    axes = {axis: (dict[str, block], Field(default_factory=dict)) for axis in methods(stage)[method].axes}
    return create_model(
        f"{stage}_{method}",
        __base__=Model,
        defaults=(block, Field(default_factory=block)),
        resources=(Resources, Field(default_factory=Resources)),
        **axes,
    )


@functools.cache
def stage_model(stage: str) -> type[Model]:
    """The schema of configs/<tier>/<stage>.yaml: one optional section per method."""
    sections = {name: (section_model(stage, name) | None, None) for name in methods(stage)}
    return create_model(f"{stage}_file", __base__=Model, **sections)


def read_revisions(path: Path) -> dict[str, str]:
    """{hub repo: commit} of a tier; empty if nothing was pinned yet."""
    found = configs.read_yaml(path) if path.is_file() else {}
    for repo, commit in found.items() if isinstance(found, dict) else [(path.name, found)]:
        if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
            raise UserError(f"{path}: {repo} = {commit!r} is not a commit of 40 hex digits; delete that line and run `make pin`.")
    return found


def settings_named(tier: str | None, seeds: str | None) -> dict[str, Any]:
    """configs/config.yaml with what a command line names instead: a tier, seeds as in `0,1,2`."""
    values = dict(configs.read_yaml("configs/config.yaml"))
    if tier:
        values["tier"] = tier
    if seeds:
        if not all(part.strip().isdigit() for part in seeds.split(",")):
            raise UserError(f"--seeds {seeds}: give whole numbers, for example 0,1,2.")
        values["seeds"] = [int(part) for part in seeds.split(",")]
    return values


class Study:
    """One tier with its seeds. `values` is the merged content of configs/config.yaml and --config."""

    def __init__(self, values: Mapping[str, Any], folder: Path = Path("configs"), results: Path = Path("results")) -> None:
        self.settings: Settings = configs.validate(Settings, dict(values), str(folder / "config.yaml"))
        self.tier, self.seeds = self.settings.tier, sorted(set(self.settings.seeds))
        self.folder, self.root = folder / self.tier, results / self.tier
        if not self.folder.is_dir():
            tiers = [p.name for p in folder.iterdir() if p.is_dir() and p.name not in ("deepspeed", "schema")]
            raise UserError(f"tier = {self.tier!r}: the folder {self.folder} does not exist{nearest(self.tier, tiers)}")
        self.revisions = read_revisions(self.folder / REVISIONS)
        self.sections = {stage: self._read(stage) for stage in STAGES}
        for stage in STAGES:
            for method in self.sections[stage]:
                self._check(stage, method)
        self._merged.cache_clear()

    # --- reading ---

    def _read(self, stage: str) -> dict[str, Any]:
        path = self.folder / f"{stage}.yaml"
        found = configs.validate(stage_model(stage), configs.read_yaml(path), str(path))
        return {name: section for name in methods(stage) if (section := getattr(found, name)) is not None}

    def names(self, stage: str, method: str, axis: str) -> list[str]:
        """The values of an axis that the YAML lists, in its order."""
        section = self.sections[stage].get(method)
        return list(getattr(section, axis)) if section else []

    def section(self, stage: str, method: str) -> Any:
        try:
            return self.sections[stage][method]
        except KeyError:
            raise UserError(f"{self.folder / stage}.yaml has no section '{method}'{nearest(method, methods(stage))}") from None

    @functools.cache  # noqa: B019 - one study per process
    def _merged(self, stage: str, method: str, values: tuple[str, ...]) -> dict[str, Any]:
        section, axes = self.section(stage, method), methods(stage)[method].axes
        result = section.defaults.model_dump(exclude_unset=True)
        for axis, value in zip(axes, values, strict=True):
            blocks = getattr(section, axis)
            if value in blocks:
                result |= blocks[value].model_dump(exclude_unset=True)
            elif axis not in methods(stage)[method].open:
                where = f"{self.folder / stage}.yaml: {method}.{axis}"
                raise UserError(f"{where} has no entry '{value}'{nearest(value, blocks)}")
        return self._pinned(result)

    def _pinned(self, block: dict[str, Any]) -> dict[str, Any]:
        """The block with the pinned commit wherever it, or a block inside it, names a repo without a revision."""
        result = {name: self._pinned(value) if isinstance(value, dict) else value for name, value in block.items()}
        if result.get("repo") in self.revisions and result.get("revision") is None:
            result["revision"] = self.revisions[result["repo"]]
        return result

    def _check(self, stage: str, method: str) -> None:
        """Build the configuration of every listed combination, so that contradictions show before any work."""
        axes = methods(stage)[method].axes
        open_axes = methods(stage)[method].open
        lists = [[*self.names(stage, method, axis), *(["-"] if axis in open_axes else [])] for axis in axes]
        for axis, values in zip(axes, lists, strict=True):
            for value in values:
                if not re.fullmatch("[a-z0-9_]+|-", value):
                    raise UserError(
                        f"{self.folder / stage}.yaml: {method}.{axis}: the name '{value}' may hold a to z, 0 to 9 and _ only, as it "
                        "becomes part of a path; rename it."
                    )
        for values in itertools.product(*lists):
            self.config(stage, method, values, seed=0, inputs={}, placeholder=True)
            for reference in self.references(stage, method, values).values():
                for one in reference.values() if isinstance(reference, Mapping) else (reference,):
                    self._check_reference(one)

    def _check_reference(self, reference: str) -> None:
        """Its method is known and its variant has an entry. Snakemake itself would say nothing while an old file exists."""
        self.path(reference, 0)
        stage, method, variant = reference.split("/")
        values = tuple(variant.split("-"))
        if len(values) != len(methods(stage)[method].axes):
            axes = "-".join(f"<{axis}>" for axis in methods(stage)[method].axes)
            raise UserError(f"{self.folder}: reference '{reference}' is not {stage}/{method}/{axes}.")
        self._merged(stage, method, values)

    # --- jobs ---

    def path(self, reference: str, seed: int | str) -> str:
        """Manifest path of `<stage>/<method>/<variant>`; a method that knows no seed lies under seed0."""
        parts = reference.split("/")
        if len(parts) != 3 or parts[0] not in STAGES or parts[1] not in methods(parts[0]):
            raise UserError(f"{self.folder}: reference '{reference}' is not <stage>/<method>/<variant> of a known method.")
        return str(self.root / reference / f"seed{seed if methods(parts[0])[parts[1]].seeded else 0}" / NAME)

    def references(self, stage: str, method: str, values: Iterable[str]) -> dict[str, Any]:
        """Input keys that the YAML sets, still as references, and those that follow from the names of the axes."""
        values = tuple(values)
        merged = self._merged(stage, method, values)
        found = {n: merged[n] for n, r in configs.roles(config_class(stage, method)).items() if r == "input" and merged.get(n)}
        if "-" in values:  # the name of an open axis is not known yet
            return found
        if (stage, method) == ("rl", "grpo") and "start" not in found:
            task, start = values
            found["start"] = self.checkpoint(task, "base" if start == "base" else f"sft_{start}")
        if stage == "evaluate" and methods(stage)[method].axes == ("task", "checkpoint") and "model" not in found:
            found["model"] = self.checkpoint(*values)
        return found

    def inputs(self, stage: str, method: str, values: Iterable[str], seed: int | str) -> dict[str, Any]:
        """Input keys as manifest paths; a key that holds several becomes a list in the order of sorted names."""
        found = {}
        for name, value in self.references(stage, method, values).items():
            if isinstance(value, Mapping):
                found[name] = [self.path(value[k], seed) for k in sorted(value)]
            else:
                found[name] = self.path(value, seed)
        return found

    def config(
        self,
        stage: str,
        method: str,
        values: Iterable[str],
        *,
        seed: int,
        inputs: Mapping[str, Any],
        output: str = "",
        placeholder: bool = False,
    ) -> JobConfig:
        """The validated configuration of one job. `inputs`: key -> path or list of paths, as Snakemake holds them."""
        values = tuple(values)
        owner, merged = config_class(stage, method), dict(self._merged(stage, method, values))
        for name, role in configs.roles(owner).items():
            if role != "input":
                continue
            reference = merged.pop(name, None)
            if isinstance(reference, Mapping):
                paths = inputs.get(name) or ["-"] * len(reference)
                merged[name] = dict(zip(sorted(reference), paths, strict=True))
            elif name in inputs:
                merged[name] = inputs[name]
            elif placeholder and (reference or owner.model_fields[name].is_required()):
                several = typing.get_origin(owner.model_fields[name].annotation) is dict
                merged[name] = {} if several else Path("-")
        merged |= {"output": output or "-", "seed": seed}
        variant = "-".join(values)
        return configs.validate(owner, merged, f"{self.folder / stage}.yaml: {method} ({variant})")

    def flags(self, stage: str, method: str, values: Iterable[str], seed: int, inputs: Mapping[str, Any], output: str) -> str:
        """Everything that may change the result, as a command line."""
        job = self.config(stage, method, values, seed=seed, inputs=inputs, output=output)
        return shlex.join(configs.flags(job))

    def settings_text(self, stage: str, method: str, values: Iterable[str]) -> str:
        """The projection of the configuration to what may change the result, as canonical JSON."""
        job = self.config(stage, method, values, seed=0, inputs={}, placeholder=True)
        found = {name: value for name, value in configs.settings(job).items() if name != "seed"}
        if name := found.get("deepspeed"):  # the file's content, not only its name
            found["deepspeed"] = configs.read_yaml(self.folder.parent / "deepspeed" / f"{name}.json")
        if (stage, method) == ("data", "edits") and found.get("file"):  # a user's own edits, when they change
            path = Path(found["file"])
            found["file"] = [found["file"], sha256(path) if path.is_file() else "missing"]
        return configs.canonical(found)

    def runtime_flags(self, stage: str, method: str, values: Iterable[str]) -> str:
        """Logging, workers, time limit: on the command line, but not a reason to run again."""
        job = self.config(stage, method, values, seed=0, inputs={}, placeholder=True)
        return shlex.join(configs.flags(job, {"runtime"}))

    def code(self, stage: str, method: str) -> str:
        return code_digest(f"posttrain.{stage}.{method}")

    def resources(self, stage: str, method: str) -> Resources:
        section = self.sections[stage].get(method)
        return section.resources if section else Resources()

    # --- the study's shape ---

    @property
    def tasks(self) -> list[str]:
        """Tasks on which arms are compared."""
        return self.names("sft", "train", "task")

    @property
    def arms(self) -> list[str]:
        return self.names("sft", "train", "arm")

    def checkpoint(self, task: str, name: str) -> str:
        """Reference of a checkpoint by the name that evaluation gives it: base, sft_<arm>, rl_base, rl_<arm>."""
        for section in self.sections["evaluate"].values():
            named = getattr(section, "checkpoint", {})
            if name in named and named[name].model:
                return named[name].model
        stage, _, arm = name.partition("_")
        if name == "base":
            return self.references("sft", "train", (task, self.arms[0]))["start"]
        if stage == "sft" and arm in self.arms:
            return f"sft/train/{task}-{arm}"
        if stage == "rl" and arm in ("base", *self.arms):
            return f"rl/grpo/{task}-{arm}"
        valid = ["base", "rl_base", *(f"sft_{a}" for a in self.arms), *(f"rl_{a}" for a in self.arms)]
        raise UserError(f"checkpoint '{name}' of task '{task}' is unknown{nearest(name, valid)}")

    @property
    def checkpoints(self) -> list[str]:
        return ["base", *(f"sft_{arm}" for arm in self.arms), "rl_base", *(f"rl_{arm}" for arm in self.arms)]

    def evaluations(self, method: str) -> list[tuple[str, str]]:
        """(task, checkpoint) pairs that `all` evaluates: every checkpoint of every compared task, and the named models of a
        group on the tasks of that group."""
        section = self.sections["evaluate"].get(method)
        if section is None:
            return []
        pairs = [(task, name) for task in section.task if task in self.tasks for name in self.checkpoints]
        named = [(task, name) for task in section.task if task not in self.tasks for name in section.checkpoint]
        return pairs + [(t, n) for t, n in named if (section.task[t].group or "") == (section.checkpoint[n].group or "")]

    def measurements(self) -> list[str]:
        """References of everything that ends in a number: evaluations, and all combinations of methods that measure."""
        found = []
        for stage in STAGES:
            for method in self.sections[stage]:
                axes = methods(stage)[method].axes
                if stage == "evaluate" and axes == ("task", "checkpoint"):
                    found += [f"{stage}/{method}/{task}-{name}" for task, name in self.evaluations(method)]
                elif methods(stage)[method].measures:
                    lists = [self.names(stage, method, axis) for axis in axes]
                    found += [f"{stage}/{method}/{'-'.join(values)}" for values in itertools.product(*lists)]
        return found

    def cards(self) -> dict[str, int]:
        """Cards of one job of each stage/method, where there are any."""
        found = {f"{s}/{m}": section.resources for s in STAGES for m, section in self.sections[s].items()}
        return {name: need.nodes * need.gpus for name, need in found.items() if need.nodes * need.gpus}

    def largest_job(self) -> tuple[str, int]:
        """(stage/method, cards) of the job that asks for most cards."""
        found = [
            (f"{s}/{m}", section.resources.nodes * section.resources.gpus)
            for s in STAGES
            for m, section in self.sections[s].items()
        ]
        return max(found, key=lambda item: item[1])

    def check_cap(self, cap: int | None) -> None:
        """A job larger than the profile's GPU cap would silently be submitted with fewer cards."""
        name, cards = self.largest_job()
        if cap is not None and 0 < cap < cards:
            raise UserError(
                f"{name} asks for {cards} GPUs, the profile's cap is gpu: {cap}; raise `resources: gpu` in the profile or lower gpus in {self.folder}."
            )

    def check_claims(self, path: Path) -> None:
        """Every claim is well formed and names tasks and arms that some tier has, so that a misspelt one is found at once.

        A claim about what only another tier has stays in this tier's ledger as not testable here.
        """
        from posttrain.report.ledger import read_claims
        from posttrain.sft.losses import Weighting

        def blocks(stage: str, method: str, axis: str) -> set[str]:
            """Names of an axis in any tier."""
            files = [configs.read_yaml(file).get(method) or {} for file in sorted(self.folder.parent.glob(f"*/{stage}.yaml"))]
            return {name for file in files for name in file.get(axis) or {}}

        arms, tasks = blocks("sft", "train", "arm"), blocks("sft", "train", "task")
        pairwise = [m for m, found in methods("evaluate").items() if found.axes == ("task", "checkpoint")]
        checkpoints = {"base", "rl_base"} | {f"{stage}_{arm}" for stage in ("sft", "rl") for arm in arms}
        for method in pairwise:
            checkpoints |= blocks("evaluate", method, "checkpoint")
            tasks |= blocks("evaluate", method, "task")
        valid = {
            "difference": checkpoints,
            "at_most": checkpoints,
            "reversal": arms,
            "overhead": set(typing.get_args(Weighting)),
        }
        for method, claims in read_claims(path).items():
            for name, claim in claims.items():
                judged = (one for condition in claim.moot_if for one in (condition.reference, condition.against))
                for reference in filter(None, (claim.reference, claim.against, *judged)):
                    self.path(reference, 0)
                    owner, kind, variant = reference.split("/")
                    found = methods(owner)[kind]
                    if claim.seeded != found.seeded:
                        raise UserError(
                            f"{path}: {method}.{name}: write seeded: {str(found.seeded).lower()}, as is {owner}/{kind}."
                        )
                    if len(found.axes) == 1 and variant not in (known := blocks(owner, kind, found.axes[0])):
                        raise UserError(f"{path}: {method}.{name}: no tier has '{reference}'{nearest(variant, known)}")
                    if found.axes == ("task", "checkpoint"):
                        task, _, checkpoint = variant.partition("-")
                        for value, known in ((task, tasks), (checkpoint, checkpoints)):
                            if value not in known:
                                raise UserError(f"{path}: {method}.{name}: no tier has '{value}'{nearest(value, known)}")
                if claim.kind not in valid:
                    continue
                if claim.task not in tasks:
                    raise UserError(f"{path}: {method}.{name}: no tier has the task '{claim.task}'{nearest(claim.task, tasks)}")
                for arm in filter(None, (*claim.arms_compared[0], *claim.arms_compared[1], *claim.arms)):
                    if arm not in valid[claim.kind]:
                        raise UserError(f"{path}: {method}.{name}: no tier has '{arm}'{nearest(arm, valid[claim.kind])}")

    @staticmethod
    def export_path(folder: Path) -> None:
        """Jobs run with the Python that runs Snakemake, whether or not its environment is active. Before it stands `folder`,
        whose sacct does not let the SLURM executor wait for ever for cancelled and preempted jobs."""
        first = [str(folder.resolve()), str(Path(sys.executable).parent)]  # resolved: sacct takes itself out of the PATH
        os.environ["PATH"] = os.pathsep.join([*first, os.environ["PATH"]])

    def export_tracking(self) -> None:
        """Hand the tracker's settings to jobs through the environment: they are never parameters. No secret is touched."""
        wandb = self.settings.wandb
        tracking.check_key(wandb.mode)
        group = f"{self.tier}-{configs.digest([self.tier, self.seeds, [s.model_dump(mode='json') for m in self.sections.values() for s in m.values()]])[:8]}"
        os.environ.update(
            {
                "POSTTRAIN_WANDB_MODE": wandb.mode,
                "POSTTRAIN_WANDB_PROJECT": wandb.project,
                "POSTTRAIN_WANDB_ENTITY": wandb.entity or "",
                "POSTTRAIN_WANDB_EPOCH": str(wandb.epoch),
                "POSTTRAIN_WANDB_GROUP": group,
            }
        )
