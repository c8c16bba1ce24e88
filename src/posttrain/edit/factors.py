"""K-FAC factors of a model's layers over capability text, computed once for all edits of that model."""

from __future__ import annotations

import time
from pathlib import Path

from posttrain.core import cli, determinism, manifest, models
from posttrain.core.config import JobConfig, key
from posttrain.edit import capability, kfac, layers

FILE = "factors.safetensors"


class Config(JobConfig):
    layers: tuple[str, ...] = key(help="globs of linear layers", min_length=1)
    labels: kfac.Labels = key("data", help="data: the text's next token; sampled: the model's own softmax")
    texts: int = key(64, help="documents of the capability text, train split", gt=0)
    tokens: int = key(512, help="leading tokens of each", gt=1)
    batch: int = key(8, help="documents at once", gt=0)
    dtype: str = key("float32", help="weights: float32 or bfloat16", pattern="^(float32|bfloat16)$")
    model: Path = key(help="manifest of the checkpoint", role="input")
    capability: Path = key(help="manifest of a corpus", role="input")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    tokenizer = models.load_tokenizer(job.model)
    model = models.place(models.load(job.model, job.dtype)).eval().requires_grad_(False)
    chosen = layers.choose(model, job.layers)
    texts = capability.read(job.capability, "train", tokenizer, job.texts, job.tokens)
    began = time.perf_counter()
    seed = determinism.derive(job.seed, "labels", 1)
    factors = kfac.accumulate(model, chosen, [t.ids for t in texts], labels=job.labels, batch=job.batch, seed=seed)
    seconds = time.perf_counter() - began
    file = kfac.save(factors, model, chosen, job.folder / FILE)
    metrics = {"tokens": factors.tokens, "texts": len(texts)}
    card = {
        "layers": {name: [layer.out_features, layer.in_features] for name, layer in chosen.items()},
        "labels": job.labels,
        "texts": [t.id for t in texts],
    }
    manifest.publish(job, metrics, [file], card=card, timings={"factors": seconds})


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
