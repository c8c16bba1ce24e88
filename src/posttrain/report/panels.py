"""What a dashboard of the study shows, as data: sections of panels that name metrics as the jobs write them.

The static page (dashboard.py) and a W&B workspace are drawn from the same description, and a test holds it against what
trainers log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from posttrain.core.config import Model, key
from posttrain.core.errors import UserError


class Panel(Model):
    title: str = key(help="what a reader calls it")
    kind: Literal["line", "bar", "scalar", "table"] = key("line", help="how it is drawn")
    metrics: tuple[str, ...] = key(help="names in history.jsonl, the manifest or provenance.json", min_length=1)
    only_if: str = key("", help="when it is logged, if not always")


class Section(Model):
    name: str = key(help="heading")
    source: Literal["history", "manifest", "provenance"] = key("history", help="file that the metrics stand in")
    jobs: tuple[str, ...] = key(help="stage/method of the jobs that write them", min_length=1)
    panels: tuple[Panel, ...] = key(help="in order", min_length=1)


TRAINED = ("base/scratch", "midtrain/prism", "sft/train", "rl/grpo")
SECTIONS = (
    Section(
        name="Training health",
        jobs=TRAINED,
        panels=(
            Panel(title="Loss", metrics=("loss",)),
            Panel(title="Gradient norm", metrics=("grad_norm",)),
            Panel(title="Learning rate", metrics=("learning_rate",)),
        ),
    ),
    Section(
        name="Reinforcement learning",
        jobs=("rl/grpo",),
        panels=(
            Panel(title="Reward", metrics=("reward",)),
            Panel(title="Reward: standard deviation", metrics=("reward_std",)),
            Panel(title="Groups without variance", metrics=("frac_reward_zero_std",)),
            Panel(title="KL to the reference", metrics=("kl",), only_if="beta is above 0"),
            Panel(title="Entropy", metrics=("entropy",)),
            Panel(title="Clipped below", metrics=("clip_ratio/low_mean",)),
            Panel(title="Clipped above", metrics=("clip_ratio/high_mean",)),
            Panel(title="Clipped on either side", metrics=("clip_ratio/region_mean",)),
            Panel(title="Completion length", metrics=("completions/mean_length",)),
            Panel(title="Completions cut at the limit", metrics=("completions/clipped_ratio",)),
        ),
    ),
    Section(
        name="Retention in mid-training",
        jobs=("midtrain/prism",),
        panels=(
            Panel(title="Held-out loss of general text", metrics=("held_out/prose",), only_if="the mix has a source prose"),
            Panel(title="Recall of facts", metrics=("fact_recall",), only_if="facts are given"),
        ),
    ),
    Section(
        name="Weights in SFT",
        jobs=("sft/train",),
        panels=(
            Panel(title="Mean weight", metrics=("weight_mean",)),
            Panel(title="Effective sample size / tokens", metrics=("weight_ess",)),
            Panel(title="Share at the floor", metrics=("weight_floor",)),
            Panel(title="Share at the cap", metrics=("weight_cap",)),
        ),
    ),
    Section(
        name="Evaluation",
        source="manifest",
        jobs=("evaluate/reasoning",),
        panels=(
            Panel(title="pass@1", kind="bar", metrics=("pass@1",)),
            Panel(title="pass@8", kind="bar", metrics=("pass@8",)),
            Panel(title="Change from the parent stage and from the base", kind="table", metrics=("pass@1", "pass@8")),
        ),
    ),
    Section(
        name="Cost",
        source="provenance",
        jobs=(*TRAINED, "evaluate/reasoning"),
        panels=(
            Panel(title="In all", kind="scalar", metrics=("wall_seconds", "cpu_seconds")),
            Panel(title="Per stage and method", kind="table", metrics=("wall_seconds", "cpu_seconds", "peak_memory_mb")),
        ),
    ),
)


def missing(written: Mapping[str, Iterable[str]], sections: Iterable[Section] = SECTIONS) -> list[str]:
    """`<section>: <metric>` of every metric that none of the section's jobs writes. `written`: stage/method -> names.

    Metrics that are logged under a condition are left out: the setting may simply be off.
    """
    found = []
    for section in sections:
        names = {name for job in section.jobs for name in written.get(job, ())}
        wanted = [metric for panel in section.panels if not panel.only_if for metric in panel.metrics]
        found += [f"{section.name}: {metric}" for metric in dict.fromkeys(wanted) if metric not in names]
    return found


def workspace(tier: str, entity: str, project: str) -> Any:
    """The sections that W&B has data for, as a workspace of its runs of `tier`. Not saved: nothing is sent yet.

    Evaluation and cost are not runs of W&B; they are on the page.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError(
            "a W&B workspace needs the package wandb-workspaces: run `.venv/bin/python -m pip install wandb-workspaces`, or "
            "leave --wandb out."
        ) from None
    sections = [
        workspaces.Section(
            name=section.name,
            is_open=True,
            panels=[
                reports.LinePlot(title=panel.title, x="train/global_step", y=[f"train/{name}" for name in panel.metrics])
                for panel in section.panels
            ],
        )
        for section in SECTIONS
        if section.source == "history"
    ]
    shown = workspaces.RunsetSettings(filters=workspaces.And(workspaces.Tags().isin([tier])))
    return workspaces.Workspace(
        entity=entity, project=project, name=f"posttrain {tier}", sections=sections, runset_settings=shown
    )
