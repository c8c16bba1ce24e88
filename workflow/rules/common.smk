"""The study behind the rules, and the helpers that every stage's rules use."""

import sys
from functools import partial
from pathlib import Path

from snakemake.exceptions import WorkflowError

WORKFLOW = Path(str(workflow.current_basedir)).parent
sys.path.insert(0, str(WORKFLOW.parent / "src"))

from posttrain.core.codes import code_digest
from posttrain.core.config import canonical
from posttrain.core.errors import UserError
from posttrain.study import Study


def explained(function, *arguments, **keywords):
    """Run `function`; what a user can correct becomes one sentence instead of a traceback."""
    try:
        return function(*arguments, **keywords)
    except UserError as error:
        raise WorkflowError(str(error)) from None


def gpu_cap(resource):
    """Cards that the profile allows at once, or None without a cap."""
    value = getattr(resource, "value", resource)
    return value if isinstance(value, int) else None


study = explained(Study, config)
explained(study.check_cap, gpu_cap(workflow.global_resources.get("gpu")))
explained(study.check_claims, Path("configs/claims.yaml"))
explained(study.export_tracking)

study.export_path(WORKFLOW / "bin")

ROOT = str(study.root)


wildcard_constraints:
    seed=r"\d+",
    corpus=r"[a-z0-9_]+",
    task=r"[a-z0-9_]+",
    tokenizer=r"[a-z0-9_]+",
    mix=r"[a-z0-9_]+",
    facts=r"[a-z0-9_]+",
    model=r"[a-z0-9_]+",
    lineage=r"[a-z0-9_]+",
    bed=r"[a-z0-9_]+",
    arm=r"[a-z0-9_]+",
    start=r"[a-z0-9_]+",
    checkpoint=r"[a-z0-9_]+",
    source=r"[a-z0-9_]+",
    study=r"[a-z0-9_]+",
    edits=r"[a-z0-9_]+",
    method=r"[a-z0-9_]+",


def launched(module, arguments="{params.flags} {resources.flags}"):
    """The shell command of a rule: one launcher for a laptop, several cards, several nodes."""
    launcher = "python -m posttrain.core.launch --nodes {resources.nodes} --gpus {resources.gpu} --threads {threads} --minutes {resources.runtime}"
    return f"{launcher} -- {module} {arguments} > {{log}} 2>&1"


def manifest_of(stage, method):
    """Output pattern of a method: results/<tier>/<stage>/<method>/<axis>-<axis>/seed<k>/manifest.json."""
    variant = "-".join(f"{{{axis}}}" for axis in axes_of(stage, method))
    return f"{ROOT}/{stage}/{method}/{variant}/seed{{seed}}/manifest.json"


def beside(kind, stage, method, ending):
    """Path of a job's log or benchmark, mirroring its results folder."""
    variant = "-".join(f"{{{axis}}}" for axis in axes_of(stage, method))
    return f"{kind}/{study.tier}/{stage}/{method}/{variant}.seed{{seed}}.{ending}"


def axes_of(stage, method):
    from posttrain.study import methods

    return methods(stage)[method].axes


def values_of(stage, method, wildcards):
    return tuple(wildcards[axis] for axis in axes_of(stage, method))


def inputs_of(stage, method):
    """Input function: the manifests that the YAML names for these wildcards."""

    def named(wildcards):
        return explained(
            study.inputs,
            stage,
            method,
            values_of(stage, method, wildcards),
            wildcards.seed,
        )

    return named


def flags_of(stage, method):
    """Parameter function: every key that may change the result, as flags in canonical form."""

    def words(wildcards, input, output):
        return explained(
            study.flags,
            stage,
            method,
            values_of(stage, method, wildcards),
            int(wildcards.seed),
            dict(input.items()),
            output[0],
        )

    return words


def settings_of(stage, method):
    """Parameter function: what may change the result, as canonical JSON. The flags say the same and the paths, but
    Snakemake compares only parameters that do not depend on input and output with those of the last run.
    """

    def text(wildcards):
        return explained(
            study.settings_text, stage, method, values_of(stage, method, wildcards)
        )

    return text


def allocation(stage, method):
    """Resources of a rule: nodes, cards of all nodes, memory and minutes that grow with each attempt, runtime flags.

    On several nodes the job itself calls srun, with one task per node; the executor's names for that are added. A
    resource `mpi` that is there at all, even empty, would do so for one node as well.
    """
    need = study.resources(stage, method)

    def flags(wildcards):
        """Logging, workers, time limit: passed as a resource, because parameters would cause reruns."""
        return explained(
            study.runtime_flags, stage, method, values_of(stage, method, wildcards)
        )

    common = {
        "nodes": need.nodes,
        "gpu": need.nodes * need.gpus,
        "mem_mb": lambda wildcards, attempt: need.megabytes(attempt),
        "runtime": lambda wildcards, attempt: need.minutes(attempt),
        "flags": flags,
    }
    if need.nodes == 1:
        return common
    even = f" --gpus-per-node={need.gpus}" if need.gpus else ""
    return common | {
        "mpi": "srun",
        "tasks": need.nodes,
        "tasks_per_gpu": 0,
        "slurm_extra": f"--ntasks-per-node=1{even}",
    }


def evaluations(method, only=None):
    """Evaluation manifests of every seed; `only` keeps (task, checkpoint) pairs."""
    return sorted(
        study.path(f"evaluate/{method}/{task}-{checkpoint}", seed)
        for task, checkpoint in explained(study.evaluations, method)
        for seed in study.seeds
        if only is None or only(task, checkpoint)
    )


def measured():
    """Manifests of everything that ends in a number, of every seed."""
    return sorted(
        {
            study.path(reference, seed)
            for reference in explained(study.measurements)
            for seed in study.seeds
        }
    )


def of_method(stage, method, seeds=study.seeds):
    """Manifests of every listed combination of a method's axes."""
    from itertools import product

    if method not in study.sections[stage]:
        return []
    lists = [study.names(stage, method, axis) for axis in axes_of(stage, method)]
    variants = ["-".join(values) for values in product(*lists)]
    return sorted(
        {
            study.path(f"{stage}/{method}/{variant}", seed)
            for variant in variants
            for seed in seeds
        }
    )
