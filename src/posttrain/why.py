"""`make why`: which jobs would run, and the reason of each in plain words.

A dry run of Snakemake says that parameters changed; what it recorded of the last run says which ones. Jobs with a reason
of their own are listed, grouped by reason. Those that run only because an input will be rebuilt are counted by rule.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.core import codes, manifest
from posttrain.core import config as configs
from posttrain.core.errors import UserError
from posttrain.diff import changes, plural, text
from posttrain.study import Study, config_class, methods, settings_named

STORE = Path(".snakemake")
SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.0 to 3.11.3 have no filters
JOB = re.compile(r"^\w+ \d+: (?P<message>.*)\nReason: (?P<reason>.*)\nShell command: (?P<command>.*)$", re.M)
FOLLOWS = "Input files updated by another job"
PLAIN = {  # beginnings of Snakemake's reasons (9.27) that need no record to be said in other words
    "Incomplete output files": "killed before it finished",
    "Code has changed": "the command of its rule in workflow/rules changed",
    "Software environment definition": "its environment in envs/ changed",
    "Forced execution": "asked for by force",
}


@dataclass(frozen=True)
class Job:
    """One job of a dry run. Its command holds all else: the module after `--`, its flags, and the log."""

    message: str
    reasons: tuple[str, ...]
    command: str

    @functools.cached_property
    def words(self) -> list[str]:
        return shlex.split(self.command.rpartition(" > ")[0].partition(" -- ")[2])

    @property
    def module(self) -> str:
        return self.words[0]

    @property
    def rule(self) -> str:
        """sft_train; the report's rules have one word."""
        return self.module.removeprefix("posttrain.").removeprefix("report.").replace(".", "_")

    @property
    def output(self) -> Path:
        return Path(flags(self.words)["output"])

    @property
    def log(self) -> Path:
        return Path(self.command.rpartition(" > ")[2].removesuffix(" 2>&1").strip())


@dataclass
class Cause:
    """Why a job runs: what is its own, what changed, and the inputs that other jobs will rebuild."""

    own: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    code: bool = False
    modules: set[str] = field(default_factory=set)
    certain: bool = True
    rebuilt: list[str] = field(default_factory=list)

    def sentence(self, known: set[str] = frozenset()) -> str:
        """In words; `known` are modules that need not be named again. Empty if nothing is left to say."""
        names = ", ".join(sorted(name.removeprefix("posttrain.") for name in self.modules - known))
        code = f"code changed: {names}{'' if self.certain else ' (edited since it ran)'}" if names else ""
        if self.code and not self.modules:
            code = "" if known else "code changed: a module that it imports"
        return "; ".join([*self.own, *self.settings, *([code] if code else [])])


def flags(words: Sequence[str]) -> dict[str, str]:
    """{name: value} of `--some-name value` and `--some-name=value`."""
    found, rest = {}, list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else rest.pop(0) if rest else ""
    return found


# --- what Snakemake says and what it recorded -----------------------------------------------------------------


def dry_run(target: str, tier: str, seeds: Sequence[int]) -> list[Job]:
    """The jobs that would run."""
    words = [sys.executable, "-m", "snakemake", target, "--dry-run", "--printshellcmds", "--cores", "1"]
    words += ["--config", f"tier={tier}", f"seeds={json.dumps(list(seeds))}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            failure(done.stdout) or failure(done.stderr) or f"snakemake {target} ended with exit code {done.returncode}."
        )
    said = done.stdout + done.stderr
    found = [Job(m["message"], tuple(re.split(r"; (?=[A-Z])", m["reason"])), m["command"]) for m in JOB.finditer(said)]
    if not found and "Nothing to be done" not in said:
        raise UserError(
            "Snakemake's dry run has a form that this code cannot read; run `snakemake --dry-run` and read its reasons."
        )
    return [job for job in found if job.command != "None"]  # those without a command only collect files


def failure(said: str) -> str:
    """What stands below the last line that names an error, as one line."""
    lines = [line.strip() for line in said.strip().splitlines()]
    starts = [i for i, line in enumerate(lines) if re.match(r"\w*(Error|Exception)\b.*:$", line)]
    return " ".join(lines[starts[-1] + 1 :]) if starts else ""


def record_path(kind: str, output: Path | str) -> Path:
    """Where Snakemake keeps what it knows of an output, as its persistence/file.py names it."""
    name, longest = urlsafe_b64encode(str(output).encode()).decode(), 254
    parts = [name[i : i + longest] for i in range(0, len(name), longest)]
    return STORE.joinpath(kind, *(f"@{part}" for part in parts[:-1]), parts[-1])


def record(output: Path) -> dict[str, Any]:
    """Snakemake's metadata of the last run; empty if there is none."""
    try:
        found = json.loads(record_path("metadata", output).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def recorded_parameters(found: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """(code digest, settings) of a record, which keeps each parameter as Python writes it."""
    code = settings = None
    for parameter in found.get("params") or []:
        try:
            value = ast.literal_eval(parameter)
            if isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value):
                code = value
            elif isinstance(value, str) and value.startswith("{"):
                settings = json.loads(value)
        except (ValueError, SyntaxError):
            continue
    return code, settings


# --- reasons --------------------------------------------------------------------------------------------------


def address(job: Job) -> tuple[str, str] | None:
    """(stage, method) of a job that a study configures; None for the report's."""
    _, stage, method = job.module.split(".")
    return None if stage == "report" or method not in methods(stage) else (stage, method)


def setting_changes(study: Study, job: Job, old: dict[str, Any]) -> list[str]:
    """`settings changed: gamma 0.999 → 0.9`, and inputs that come from elsewhere now."""
    before = flags(shlex.split(old.get("shellcmd") or "")[1:])
    now, found, where = flags(job.words), [], address(job)
    if where:
        _, settings = recorded_parameters(old)
        variant = manifest.identity(job.output)[2].split("-")
        if settings is not None:
            found += changes(settings, json.loads(study.settings_text(*where, variant)))
        compared = {name for name, role in configs.roles(config_class(*where)).items() if role == "input"}
    else:
        compared = now.keys() - {"output"}
    if before:
        found += [(name, before.get(name), now.get(name)) for name in sorted(compared) if before.get(name) != now.get(name)]
    shown = ", ".join(f"{name} {text(a)} → {text(b)}" for name, a, b in found)
    return [f"settings changed: {shown}"] if found else []


class Past:
    """The package as it was at the commits that a study's results name, each unpacked once."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder

    @functools.cached_property
    def commits(self) -> list[str]:
        """Commits at which the study's jobs ran, the most frequent first."""
        found: Counter[str] = Counter()
        for path in self.root.rglob("provenance.json"):
            try:
                commit = json.loads(path.read_text())["commit"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            found.update([commit] if re.fullmatch("[0-9a-f]{40,64}", str(commit)) else [])
        return [commit for commit, _ in found.most_common()]

    @functools.cache  # noqa: B019 - one per process
    def source(self, commit: str) -> Path | None:
        done = subprocess.run(["git", "archive", commit, "src/posttrain"], capture_output=True, check=False)
        if done.returncode:
            return None
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(self.folder / commit, **SAFELY)
        return self.folder / commit / "src" / "posttrain"

    @functools.cache  # noqa: B019
    def closure(self, module: str, digest: str) -> dict[str, str] | None:
        """Modules with their digests as the job ran them, or None if no commit has exactly that code."""
        for commit in self.commits:
            root = self.source(commit)
            try:
                if root and codes.code_digest(module, root) == digest:
                    return codes.closure(module, root)
            except (ModuleNotFoundError, SyntaxError):
                continue
        return None


def code_change(past: Past, job: Job, old: dict[str, Any]) -> tuple[bool, set[str], bool]:
    """(whether the code changed, the modules as far as they can be known, whether that is certain).

    Certain if a commit that some result names holds the code that ran; else the modules that are newer than the result,
    unless most are, as after a fresh checkout.
    """
    digest, _ = recorded_parameters(old)
    if digest is None or digest == codes.code_digest(job.module):
        return False, set(), True
    now = codes.closure(job.module)
    if then := past.closure(job.module, digest):
        return True, {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}, True
    newer = {name for name in now if modified(name) > old.get("starttime", float("inf"))}
    return True, newer if 2 * len(newer) < len(now) else set(), False


@functools.cache
def modified(module: str) -> float:
    path = codes.ROOT.joinpath(*module.split(".")[1:])
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return next((file.stat().st_mtime for file in files if file.is_file()), 0.0)


def missing(study: Study, job: Job, old: dict[str, Any]) -> str:
    """Why there is no output: killed, failed, deleted, or not built yet."""
    if record_path("incomplete", job.output).exists():
        locks = STORE / "locks"
        return (
            "running now or killed before it finished" if locks.is_dir() and any(locks.iterdir()) else "killed before it finished"
        )
    if job.log.is_file() and job.log.stat().st_mtime > old.get("endtime", 0) + 1:
        return "output missing: its last run failed, see its log in logs/"
    if old:
        return "output missing: it was deleted"
    if address(job):
        seed = job.output.parent.name
        if study.root.is_dir() and not any(study.root.glob(f"*/*/*/{seed}/{manifest.NAME}")):
            return f"output missing: {seed.replace('seed', 'seed ')} is new"
    return "output missing: not built yet"


def cause(study: Study, past: Past, job: Job) -> Cause:
    found, old = Cause(), record(job.output)
    found.settings = setting_changes(study, job, old)
    found.code, found.modules, found.certain = code_change(past, job, old)
    for reason in job.reasons:
        said, _, files = reason.partition(": ")
        if said == FOLLOWS:
            found.rebuilt = files.split(", ")
        elif said == "Missing output files":
            found.own.append(missing(study, job, old))
        elif said == "Updated input files":
            found.own.append(f"input changed: {files}")
        elif said.startswith("Set of input files"):
            found.own += [] if found.settings else ["other inputs than in its last run"]
        elif said.startswith("Params have changed"):
            found.own += [] if found.settings or found.code else ["its parameters changed"]
        else:
            found.own.append(next((plain for start, plain in PLAIN.items() if said.startswith(start)), reason))
    return found


# --- the text -------------------------------------------------------------------------------------------------


def merged(messages: Sequence[str]) -> list[str]:
    """One line for jobs that differ in their seed alone."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        found = re.fullmatch(r"(.*) \(seed (\d+)\)", message)
        groups.setdefault(found[1] if found else message, []).extend([found[2]] if found else [])
    return [
        f"{name} ({'seed' if len(seeds) == 1 else 'seeds'} {', '.join(sorted(seeds, key=int))})" if seeds else name
        for name, seeds in groups.items()
    ]


def render(jobs: Sequence[Job], causes: Sequence[Cause]) -> str:
    """Reasons with their jobs, then what follows from them.

    A job whose input will be rebuilt is listed only for what no job above it says: other settings, or a module that
    changed. That its own output is missing too is no reason of its own.
    """
    known = set().union(*(c.modules for c in causes if not c.rebuilt))
    roots: dict[str, list[str]] = {}
    more: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}  # rule -> inputs to be rebuilt, per job
    counts: Counter[str] = Counter()
    for job, found in zip(jobs, causes, strict=True):
        if not found.rebuilt:
            roots.setdefault(found.sentence() or "reason unknown", []).append(job.message)
        elif sentence := replace(found, own=[]).sentence(known | {""}):
            more.setdefault(f"{sentence}, and an input will be rebuilt", []).append(job.message)
        else:
            counts[job.rule] += 1
            after.setdefault(job.rule, []).extend(found.rebuilt)
    lines = [f"{plural(len(jobs), 'job')} would run."]
    for sentence, messages in [*sorted(roots.items()), *sorted(more.items())]:
        lines += ["", f"{sentence}:", *(f"  {line}" for line in merged(sorted(messages)))]
    if after:
        total = counts.total()
        lines += ["", f"{plural(total, 'job')} only {'follows' if total == 1 else 'follow'}, as an input will be rebuilt:"]
        makers = {str(job.output): job.rule for job in jobs}
        for rule, files in after.items():
            by = sorted({makers[file] for file in files if file in makers})
            lines += [f"  {rule} {counts[rule]}{', by ' + ', '.join(by) if by else ''}"]
    return "\n".join(lines)


def explain(target: str, values: dict[str, Any]) -> str:
    """What `make why` prints."""
    study = Study(values)
    jobs = dry_run(target, study.tier, study.seeds)
    if not jobs:
        return "Nothing to do: every result is up to date."
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        past = Past(study.root, Path(folder))
        return render(jobs, [cause(study, past, job) for job in jobs])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m posttrain.why", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tier", help="folder of configs/; default: configs/config.yaml")
    parser.add_argument("--seeds", help="for example 0,1,2; default: configs/config.yaml")
    parser.add_argument("--target", default="all", help="rule or file to make")
    given = parser.parse_args(arguments)
    try:
        print(explain(given.target, settings_named(given.tier, given.seeds)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
