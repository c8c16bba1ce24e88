"""`make pin`: ask the hub once for the commit of every model and data set that a tier names without a revision.

Writes configs/<tier>/revisions.yaml, {repo: commit}; commit it to git. What is pinned stays pinned, so that a second call
changes nothing; `--update` asks again for all. The only module besides the fetching jobs that needs network access.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.errors import UserError
from posttrain.core.manifest import write_atomically
from posttrain.study import REVISIONS, Study

HEADER = "# Commits of hub repositories, asked for by `make pin`. They fill each `revision` that the tier's files leave out.\n"
SOURCES = (("base", "hub", "model", "model"), ("sft", "traces", "task", "dataset"))
"""(stage, method, axis, kind of repository) of the blocks that may name a hub repo."""


def repositories(study: Study) -> dict[str, tuple[str, str | None]]:
    """{repo: (kind, revision or None)} of every hub repository of a tier; kind is `model` or `dataset`."""
    found: dict[str, tuple[str, str | None]] = {}
    for stage, method, axis, kind in SOURCES:
        for name in study.names(stage, method, axis):
            job = study.config(stage, method, (name,), seed=0, inputs={}, placeholder=True)
            if job.repo is not None and (job.revision is None or job.repo not in found):
                found[job.repo] = (kind, job.revision)
    streams = [("midtrain", "prism", (name,)) for name in study.names("midtrain", "prism", "model")]
    arms = study.names("distill", "tail_kd", "arm")[:1]  # a stream belongs to the task, not to the arm
    streams += [("distill", "tail_kd", (task, arm)) for task in study.names("distill", "tail_kd", "task") for arm in arms]
    for stage, method, values in streams:
        job = study.config(stage, method, values, seed=0, inputs={}, placeholder=True)
        for source in job.stream.sources.values() if job.stream else ():
            if source.repo is not None and (source.revision is None or source.repo not in found):
                found[source.repo] = ("dataset", source.revision)
    return found


def commit(api: Any, repo: str, kind: str) -> str:
    """The newest commit of a repository. api: a huggingface_hub.HfApi."""
    try:
        found = api.repo_info(repo, repo_type=kind).sha
    except Exception as error:  # the hub's client changes its transport, and errors of transport have no common base
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the hub did not tell the commit of {kind} {repo} ({reason}); check the id, access (`hf auth login`) and network."
        ) from None
    if not found:
        raise UserError(f"the hub names no commit for {kind} {repo}; set its revision by hand.")
    return found


def write(revisions: Mapping[str, str], path: Path) -> None:
    """The file that Study reads; commits are quoted, because some hex digits are also a number."""
    write_atomically(path, HEADER + "".join(f'{repo}: "{revisions[repo]}"\n' for repo in sorted(revisions)))


def pin(study: Study, api: Any, *, update: bool = False) -> dict[str, str]:
    """Commits that were asked for, after they were written beside what was pinned already."""
    wanted = {
        repo: kind
        for repo, (kind, revision) in repositories(study).items()
        if revision is None or (update and study.revisions.get(repo) == revision)
    }
    new = {repo: commit(api, repo, kind) for repo, kind in sorted(wanted.items())}
    if new:
        write({**study.revisions, **new}, study.folder / REVISIONS)
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m posttrain.pin", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tier", required=True, help="folder of configs/")
    parser.add_argument("--update", action="store_true", help="ask again for what is pinned already")
    given = parser.parse_args(arguments)
    try:
        study = Study({"tier": given.tier})
        known = repositories(study)
        from huggingface_hub import HfApi

        new = pin(study, HfApi(), update=given.update)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for repo, found in new.items():
        print(f"{repo}: {found}")
    if new:
        print(f"Wrote {study.folder / REVISIONS}; commit it.")
    else:
        state = f"all {len(known)} hub repositories have a revision" if known else "it names no hub repository"
        print(f"Nothing to pin in {study.folder}: {state}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
