"""Linear merge of two checkpoints, as PRISM does before it restores long context (arXiv 2603.17074): 0.15 base + 0.85 mid."""

from __future__ import annotations

from pathlib import Path

from posttrain.core import cli, determinism, manifest, models
from posttrain.core.config import JobConfig, key
from posttrain.core.errors import UserError
from posttrain.core.weights import Weights, interpolate, require_same

# What a configuration says besides the function that the weights are used in.
BOOKKEEPING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
SPECIAL = {"bos_token_id", "eos_token_id", "pad_token_id"}


class Config(JobConfig):
    weight: float = key(0.15, help="weight of start; other has the rest", ge=0, le=1)
    start: Path = key(help="manifest of the first checkpoint (the paper's base)", role="input")
    other: Path = key(
        help="manifest of the second checkpoint (the paper's mid-trained one); configuration and tokenizer come from it",
        role="input",
    )


def require_same_function(first: dict, other: dict, names: tuple[Path, Path]) -> None:
    """Two model configurations mean the same function of the weights, or one sentence that names the first difference."""
    for name in sorted((set(first) | set(other)) - BOOKKEEPING - SPECIAL):
        if first.get(name) != other.get(name):
            raise UserError(
                f"{name} is {first.get(name)!r} in the model of {names[0]} and {other.get(name)!r} in that of {names[1]}; "
                "merge checkpoints of one architecture."
            )


def main(job: Config) -> None:
    """Writes `model/`: every tensor is weight * start + (1 - weight) * other in float32, at weight 0 and 1 an exact copy."""
    determinism.setup(job.seed)
    import torch

    start, other = Weights(job.start), Weights(job.other)
    require_same(start, other)
    tokenizer = models.load_tokenizer(job.other)
    if tokenizer.get_vocab() != models.load_tokenizer(job.start).get_vocab():
        raise UserError(f"the vocabularies of {job.start} and {job.other} differ; merge checkpoints that share a tokenizer.")
    model = models.load(job.other)
    first = type(model.config).from_pretrained(models.model_folder(job.start), local_files_only=True)
    require_same_function(first.to_dict(), model.config.to_dict(), (job.start, job.other))
    state = other.require_parameters_of(model)
    with torch.no_grad():
        for name in start.names:
            state[name].copy_(interpolate(job.weight, start.tensor(name).float(), other.tensor(name).float()))
    files = models.save(model, tokenizer, job.folder)
    card = {"dtypes": {"start": start.dtypes(), "other": other.dtypes()}, "tied_copies_left_out": other.tied}
    metrics = {"parameters": model.num_parameters(), "tensors": len(start.names)}
    manifest.publish(job, metrics, files, card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
