"""Teacher statistics of a corpus, computed once: the full log-probabilities of the next token at every target position.

TAD needs the teacher's whole tail at every position (arXiv 2602.20816 through public notes), so a cache of the top K is of no
use to it: what is stored is all V numbers, in float16 by default. That is small for small vocabularies alone (tokens x V x 2
bytes; a million tokens at V = 100 are 0.2 GB, at V = 150,000 they are 300 GB); beyond `max_gb` the job refuses, and students run the
teacher online (`distill/tail_kd` without statistics), which costs one forward pass. What the rounding costs is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from posttrain.core import cli, determinism, manifest, models
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError
from posttrain.distill import metrics
from posttrain.distill.examples import Source, collate, columns, fingerprint, following, logits_of, vocabulary_of

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class Config(JobConfig):
    length: int = key(256, help="tokens per packed row; longest row of demonstrations and traces", gt=1)
    rows: int | None = key(None, help="store the first rows of the training split alone; null: all", gt=0)
    dtype: Literal["float16", "bfloat16", "float32"] = key("float16", help="of the stored log-probabilities")
    max_gb: float = key(1.0, help="refuse to store more than this", gt=0)
    shard_rows: int = key(1024, help="rows per file", gt=0)
    batch: int = key(32, help="rows at once", gt=0)
    model: Path = key(help="manifest of the teacher", role="input")
    mix: Path | None = key(None, help="token mix manifest", role="input")
    task: Path | None = key(None, help="task manifest: its demonstrations", role="input")
    traces: Path | None = key(None, help="traces manifest", role="input")

    def model_post_init(self, _context: Any) -> None:
        if sum(path is not None for path in (self.mix, self.task, self.traces)) != 1:
            raise ValueError("give one of mix, task and traces")


def check_size(job: Config, positions: int, vocabulary: int) -> float:
    """Gigabytes (1e9 bytes) of the stored statistics, or a sentence."""
    size = positions * vocabulary * BYTES[job.dtype] / 1e9
    if size > job.max_gb:
        raise UserError(
            f"statistics of {positions} positions over {vocabulary} tokens take {size:.3g} GB and max_gb is {job.max_gb:g}; leave statistics out of distill/tail_kd, which then runs the teacher online, or lower rows or raise max_gb."
        )
    return size


def shard(number: int) -> str:
    return f"logps-{number:05d}.safetensors"


class Stored:
    """Rows with their stored log-probabilities: row i has `logps` [T, V], zeros where nothing is predicted. Shards stay on disk."""

    def __init__(self, path: Path, rows: list[dict[str, Any]], teacher: Path) -> None:
        found = manifest.read(path)
        if found.inputs["model"] != manifest.sha256(teacher):
            raise UserError(f"the statistics {path} were made by another model than the teacher {teacher}; rebuild them.")
        count = found.card["rows"]
        if len(rows) < count or fingerprint(rows[:count]) != found.card["fingerprint"]:
            raise UserError(
                f"the statistics {path} are of other rows than this job trains on; give both the same data and length."
            )
        self.folder, self.rows, self.per_shard = path.parent, rows[:count], found.card["shard_rows"]
        self.files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch
        from safetensors import safe_open

        number, place = divmod(index, self.per_shard)
        if number not in self.files:
            self.files[number] = safe_open(self.folder / shard(number), framework="pt")
        opened, row = self.files[number], self.rows[index]
        low, high = opened.get_slice("offsets")[place : place + 2].tolist()
        stored = opened.get_slice("logps")[low:high]
        _, mask = following(row["labels"][None])
        logps = torch.zeros(len(row["labels"]), stored.shape[-1], dtype=stored.dtype)
        logps[mask[0]] = stored
        return row | {"logps": logps}


def main(job: Config) -> None:
    determinism.setup(job.seed)
    import torch
    from safetensors.torch import save_file

    tokenizer = models.load_tokenizer(job.model)
    rows = Source(job.mix, job.task, job.traces).rows("train", job.length, tokenizer)[: job.rows]
    positions = sum(int(following(row["labels"][None])[1].sum()) for row in rows)
    model = models.place(models.load(job.model)).eval()
    vocabulary = vocabulary_of(tokenizer)
    columns(vocabulary, model)
    size, dtype = check_size(job, positions, vocabulary), getattr(torch, job.dtype)
    files, losses, furthest = [], [], 0.0
    for number, start in enumerate(range(0, len(rows), job.shard_rows)):
        part, kept, offsets = rows[start : start + job.shard_rows], [], [0]
        for at in range(0, len(part), job.batch):
            batch = {n: v.to(model.device) for n, v in collate(part[at : at + job.batch], tokenizer.pad_token_id).items()}
            _, mask = following(batch["labels"])
            with torch.inference_mode():
                exact = logits_of(model, batch)[mask][:, :vocabulary].float().log_softmax(-1)
            stored = exact.to(dtype)
            if number == 0 and at == 0:  # what rounding costs, on the first rows
                values, _ = metrics.compare(exact, stored.float(), min(10, vocabulary // 2))
                losses, furthest = values["kl"].tolist(), float((exact - stored.float()).abs().max())
            kept.append(stored.cpu())
            offsets += (offsets[-1] + mask.sum(1).cumsum(0)).tolist()
        path = job.folder / shard(number)
        save_file({"logps": torch.cat(kept), "offsets": torch.tensor(offsets)}, path)
        files.append(path)
    measured = {
        "positions": positions,
        "gigabytes": size,
        "rounding_kl": manifest.metric(losses),
        "rounding_logp": furthest,
    }
    card = {"rows": len(rows), "shard_rows": job.shard_rows, "fingerprint": fingerprint(rows), "dtype": job.dtype}
    manifest.publish(job, measured, files, card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
