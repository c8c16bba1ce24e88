"""The dashboard of a tier from what has finished so far: a static page always, a W&B workspace if asked for.

``python -m posttrain.dashboard --tier tiny --seeds 0,1,2`` needs no network and starts no job; with ``--wandb`` the same
panels become a workspace of the project that configs/config.yaml names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain.core import config as configs
from posttrain.core.errors import UserError
from posttrain.report import dashboard, panels
from posttrain.study import Study, settings_named


def draw(study: Study) -> Path:
    """Write the page; its path."""
    path = study.root / "report" / "dashboard.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"root": study.root, "seeds": study.seeds, "arms": study.arms, "tasks": study.tasks, "gpus": study.cards()}
    options["measured"] = study.measurements()
    dashboard.main(configs.validate(dashboard.Config, {"output": path, **options}, "the dashboard"))
    return path


def send(study: Study) -> str:
    """Create the workspace; its address. What W&B refuses is one sentence."""
    wandb = study.settings.wandb
    if not wandb.entity:
        raise UserError("wandb.entity of configs/config.yaml is null: name your W&B team or user there to create a workspace.")
    made = panels.workspace(study.tier, wandb.entity, wandb.project)
    try:
        made.save()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"W&B did not take the workspace ({type(error).__name__}: {reason}); see docs/wandb.md.") from None
    return made.url


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence."""
    parser = argparse.ArgumentParser(
        prog="python -m posttrain.dashboard", description=__doc__.split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--tier", required=True, help="folder of configs/")
    parser.add_argument("--seeds", help="for example 0,1,2; default: configs/config.yaml")
    parser.add_argument("--wandb", action="store_true", help="create a W&B workspace too (needs wandb-workspaces and a key)")
    given = parser.parse_args(arguments)
    try:
        study = Study(settings_named(given.tier, given.seeds))
        print(f"Dashboard: {draw(study)} (open it in a browser)", flush=True)
        if given.wandb:
            print(f"Workspace: {send(study)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
