"""A model from the Hugging Face hub at a pinned commit: safetensors, tokenizer and configuration only, no remote code."""

from __future__ import annotations

from posttrain.core import cli, manifest
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError

PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.jinja", "merges.txt", "vocab.*", "LICENSE*")


class Config(JobConfig):
    repo: str = key(help="hub id, owner/name", pattern="^[^/ ]+/[^/ ]+$")
    revision: str | None = key(None, help="commit (40 hex digits); written by `make pin`", pattern="^[0-9a-f]{40}$")


def main(job: Config) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if job.revision is None:
        raise UserError(f"{job.repo} has no revision; run `make pin` once with network access and commit the file it writes.")
    folder = job.folder / "model"
    try:
        snapshot_download(job.repo, revision=job.revision, local_dir=folder, allow_patterns=list(PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{job.repo}@{job.revision[:8]} could not be fetched ({reason}); check the id, access rights (`hf auth login`) and network.") from None
    files = sorted(f for f in folder.rglob("*") if f.is_file() and ".cache" not in f.parts)
    if not any(f.suffix == ".safetensors" for f in files):
        raise UserError(f"{job.repo}@{job.revision[:8]} has no safetensors weights; choose a revision that has them.")
    manifest.publish(job, {"files": len(files)}, files, card={"repo": job.repo, "revision": job.revision})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
