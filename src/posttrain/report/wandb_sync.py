"""W&B artifacts that mirror the manifests: what a study made, from what, with one link per link of the rule graph.

Manifests are the truth and this is their copy: it runs after the study, on its own (`snakemake wandb_sync`), and W&B
refuses `use_artifact` offline. What is to be sent is plain data (:func:`specify`); sending it is the last, thin step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from posttrain.core import cli, manifest, tracking
from posttrain.core.config import JobConfig, digest, key
from posttrain.core.errors import UserError
from posttrain.core.manifest import Manifest

NAME_LENGTH = 128  # W&B's limit
DIGEST = 12  # hex digits of a manifest's sha256 that make an alias


class Config(JobConfig):
    root: Path = key(help="results/<tier>")
    targets: tuple[Path, ...] = key(help="manifests to send, with everything that they were made from", min_length=1)
    dry_run: bool = key(False, help="write the list, send nothing", role="runtime")


class Spec(NamedTuple):
    """One artifact of one run, as data.

    `references`: files by name, path and sha256 that W&B is told of but never given. `uses`: the artifacts, as
    `<name>:<alias>`, that the job read.
    """

    name: str
    type: str
    aliases: tuple[str, ...]
    metadata: dict[str, Any]
    manifest: Path
    references: tuple[tuple[str, Path, str], ...]
    uses: tuple[str, ...]
    run: dict[str, Any]
    segments: tuple[Path, ...]


class Client(Protocol):
    """What sending needs of W&B. `send` returns when the server has the artifact."""

    def sync(self, segments: Iterable[Path]) -> None: ...

    def send(self, spec: Spec) -> None: ...


def kind(found: Manifest) -> str:
    """`model` if there are weights, `eval-table` for what measures, else `dataset`."""
    if any(name.endswith(".safetensors") for name in found.artifacts):
        return "model"
    return "eval-table" if found.stage == "evaluate" or found.method == "overhead" else "dataset"


def artifact_name(tier: str, found: Manifest) -> str:
    """Letters, digits, dashes and underscores; cut with a digest where W&B's limit is passed."""
    name = f"{tier}-{found.identity.replace('/', '-')}"
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 9]}-{digest(name)[:8]}"


def lineage(root: Path, targets: Iterable[Path]) -> dict[Path, list[Path]]:
    """Every manifest that the targets rest on and those that it reads, inputs before what uses them.

    Links are the digests that the manifests hold, not what the configuration says today. Raises :class:`UserError` if an
    input was rebuilt or deleted since.
    """
    known: dict[str, list[Path]] = {}
    for path in sorted(root.glob(f"*/*/*/seed*/{manifest.NAME}")):
        known.setdefault(manifest.sha256(path), []).append(path)
    found: dict[Path, list[Path]] = {}

    def visit(path: Path) -> None:
        if path in found:
            return
        reads = []
        for name, sha in manifest.read(path, verify=False).inputs.items():
            if sha not in known:
                raise UserError(f"{path}: its input '{name}' was rebuilt or deleted since; run `snakemake {path}` first.")
            reads.append(known[sha][0])
        for one in reads:
            visit(one)
        found[path] = reads

    for target in targets:
        visit(Path(target))
    return found


def specify(root: Path, targets: Iterable[Path]) -> list[Spec]:
    """The artifacts of the targets and of everything behind them, in an order in which they can be sent."""
    tier, specs = root.name, {}
    for path, reads in lineage(root, targets).items():
        found = manifest.read(path, verify=False)
        parts = [tier, found.stage, found.method, found.variant, found.seed]
        specs[path] = Spec(
            name=artifact_name(tier, found),
            type=kind(found),
            aliases=("latest", manifest.sha256(path)[:DIGEST]),
            metadata=found.model_dump(mode="json"),
            manifest=path,
            references=tuple((name, path.parent / name, one.sha256) for name, one in found.artifacts.items()),
            uses=tuple(f"{specs[one].name}:{specs[one].aliases[-1]}" for one in reads),
            run={
                "id": tracking.id_of(parts, found.config),
                "name": found.identity,
                "job_type": found.stage,
                "tags": [tier, found.stage, found.method],
                "config": found.config,
            },
            segments=tuple(sorted((path.parent / "wandb").glob("offline-run-*"))),
        )
    return list(specs.values())


def send(specs: Iterable[Spec], client: Client, receipt: Path) -> int:
    """Send what the receipt does not list yet; the number sent. The receipt grows with each, so a second call goes on."""
    done: dict[str, str] = json.loads(receipt.read_text()) if receipt.is_file() else {}
    count = 0
    for spec in specs:
        if done.get(spec.name) == spec.aliases[-1]:
            continue
        client.sync(spec.segments)
        client.send(spec)
        done[spec.name] = spec.aliases[-1]
        manifest.write_atomically(receipt, json.dumps(done, indent=1, sort_keys=True) + "\n")
        count += 1
    return count


class Server:
    """W&B itself: one run per job (that of the trainer, where it had one), its inputs used, its artifact logged."""

    def __init__(self, project: str, entity: str | None, group: str | None) -> None:
        self.project, self.entity, self.group = project, entity, group

    def sync(self, segments: Iterable[Path]) -> None:
        """Offline attempts first, oldest first: the run must exist with its history before something is added to it."""
        wanted = [str(path) for path in segments]
        if not wanted:
            return
        target = ["--project", self.project, *(["--entity", self.entity] if self.entity else [])]
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", *target, *wanted], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(f"wandb sync: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")

    def send(self, spec: Spec) -> None:
        import wandb

        settings = wandb.Settings(
            silent=True, disable_git=True, x_disable_stats=True, console="off", init_timeout=tracking.PATIENCE
        )
        where = {"project": self.project, "entity": self.entity, "group": self.group, "dir": str(spec.manifest.parent)}
        with wandb.init(**where, **spec.run, mode="online", resume="allow", settings=settings) as run:
            for name in spec.uses:
                run.use_artifact(name)
            run.summary.update({name: metric["value"] for name, metric in spec.metadata["metrics"].items()})
            run.log_artifact(build(spec), aliases=list(spec.aliases)).wait()


def build(spec: Spec) -> Any:
    """The artifact: the manifest itself, and every other file as a reference with its MD5 (`download` checks that)."""
    import wandb

    artifact = wandb.Artifact(spec.name, spec.type, metadata=spec.metadata)
    artifact.add_file(str(spec.manifest), name=manifest.NAME)
    for name, path, _ in spec.references:
        artifact.add_reference(path.resolve().as_uri(), name=name)
    return artifact


def table(specs: Iterable[Spec]) -> str:
    """One line per artifact: name, type, alias, what it uses."""
    lines = ["artifact\ttype\talias\tuses"]
    lines += ["\t".join((s.name, s.type, s.aliases[-1], " ".join(s.uses))) for s in specs]
    return "\n".join(lines) + "\n"


def main(job: Config, environment: Mapping[str, str] = os.environ) -> None:
    specs = specify(job.root, job.targets)
    if not job.dry_run:
        if tracking.mode() == "disabled":
            raise UserError("wandb.mode = disabled: set offline or online in configs/config.yaml, or --dry-run true.")
        tracking.check_key("online")
        project, entity, group = (environment.get(f"POSTTRAIN_WANDB_{name}") for name in ("PROJECT", "ENTITY", "GROUP"))
        server = Server(project or "posttrain", entity or None, group or None)
        where = digest(
            [server.project, server.entity, environment.get("WANDB_BASE_URL"), environment.get("POSTTRAIN_WANDB_EPOCH")]
        )
        try:
            count = send(specs, server, job.folder / f".wandb_sent.{where[:8]}.json")
        except UserError:
            raise
        except Exception as error:  # W&B's own kinds of error are many; what was sent is in the receipt
            reason = (str(error).strip().splitlines() or [""])[0]
            raise UserError(
                f"W&B did not take an artifact ({type(error).__name__}: {reason}); run the same command again, it goes on "
                "where it stopped."
            ) from None
        print(f"{count} artifacts were sent, {len(specs) - count} were there already.")
    manifest.write_atomically(job.output, table(specs))


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
