"""A model from the Hugging Face hub at a pinned commit: safetensors, tokenizer and configuration only, no remote code."""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, manifest
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError

PATTERNS = ("*.safetensors", "*.json", "tokenizer*", "*.jinja", "merges.txt", "vocab.*", "LICENSE*")


class Config(JobConfig):
    repo: str = key(help="hub id, owner/name", pattern="^[^/ ]+/[^/ ]+$")
    revision: str | None = key(None, help="commit (40 hex digits); written by `make pin`", pattern="^[0-9a-f]{40}$")


def turn_end(folder: Path) -> str | None:
    """Make the token that the chat template writes after an assistant's turn the EOS, and return it.

    Base checkpoints often name an end-of-document token instead, which their own template never writes: masks would
    hold no EOS, and sampling would run past the end of a turn. None (and nothing changed) without a chat template.
    """
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        return None
    user = [{"role": "user", "content": "q"}]
    head = tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*user, {"role": "assistant", "content": "a"}], tokenize=True, return_dict=True)[
        "input_ids"
    ]
    special = [token for token in whole[len(head) :] if token in tokenizer.all_special_ids]
    end = tokenizer.convert_ids_to_tokens(special[-1]) if special else tokenizer.eos_token
    if end != tokenizer.eos_token:
        tokenizer.eos_token = end
        tokenizer.save_pretrained(folder)
        generation = (
            GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else GenerationConfig()
        )
        generation.eos_token_id = tokenizer.eos_token_id
        generation.save_pretrained(folder)
    return end


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
        raise UserError(
            f"{job.repo}@{job.revision[:8]} could not be fetched ({reason}); check the id, access rights (`hf auth login`) and network."
        ) from None
    files = sorted(f for f in folder.rglob("*") if f.is_file() and ".cache" not in f.parts)
    if not any(f.suffix == ".safetensors" for f in files):
        raise UserError(f"{job.repo}@{job.revision[:8]} has no safetensors weights; choose a revision that has them.")
    if end := turn_end(folder):
        files = sorted(f for f in folder.rglob("*") if f.is_file() and ".cache" not in f.parts)
    manifest.publish(job, {"files": len(files)}, files, card={"repo": job.repo, "revision": job.revision, "end_of_turn": end})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
