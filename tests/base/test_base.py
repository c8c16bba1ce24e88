"""Base models: the packaged conversion, the hub with a local fake, deterministic training from scratch."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from posttrain.base import hub, packaged, scratch
from posttrain.core import manifest, models
from posttrain.core.errors import UserError
from posttrain.core.models import Shape


def output(tmp_path, method):
    path = tmp_path / "base" / method / "m" / "seed0" / "manifest.json"
    path.parent.mkdir(parents=True)
    return path


def test_scratch_is_deterministic_and_follows_the_seed(world, tmp_path):
    def digest(name, seed):
        path = tmp_path / name / "base/scratch/m" / f"seed{seed}" / "manifest.json"
        path.parent.mkdir(parents=True)
        shape = Shape(hidden=16, layers=1, heads=2, intermediate=32, context=64)
        scratch.main(
            scratch.Config(
                output=path, seed=seed, shape=shape, length=32, steps=3, batch_size=4, mix=world.mix, tokenizer=world.tokenizer
            )
        )
        return manifest.read(path).artifacts["model/model.safetensors"].sha256

    assert digest("a", 0) == digest("b", 0) != digest("c", 1)


def test_shape_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="hidden 30 is not a multiple of heads 4"):
        Shape(hidden=30, heads=4)


def test_hub_download_with_a_local_fake(world, tmp_path, monkeypatch):
    """The pinned revision is asked for, weights and tokenizer arrive and load; nothing but data files is requested."""
    asked = {}

    def fake(repo, *, revision, local_dir, allow_patterns):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns)
        shutil.copytree(world.base.parent / "model", local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    job = hub.Config(output=output(tmp_path, "hub"), repo="owner/name", revision="a" * 40)
    hub.main(job)
    assert asked["repo"] == "owner/name" and asked["revision"] == "a" * 40
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["patterns"])
    assert models.load(job.output).num_parameters() > 0
    assert manifest.read(job.output).card == {"repo": "owner/name", "revision": "a" * 40, "end_of_turn": "<eos>"}


def test_eos_becomes_what_the_template_writes_after_a_turn(world, tmp_path):
    """As in base checkpoints that name an end-of-document token as EOS while their template closes turns otherwise."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(world.base.parent / "model", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<start>", "<end>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<start>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    assert hub.turn_end(folder) == "<end>"
    found = AutoTokenizer.from_pretrained(folder)
    assert found.eos_token == "<end>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == found.eos_token_id
    from posttrain.data import chat

    assert chat.render(found, "12", "34")[1][-1] == found.eos_token_id


def test_hub_errors_name_repo_and_remedy(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="owner/name has no revision; run `make pin`"):
        hub.main(hub.Config(output=output(tmp_path / "a", "hub"), repo="owner/name"))

    def offline(*_, **__):
        raise OSError("network is unreachable\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"owner/name@aaaaaaaa could not be fetched \(network is unreachable\)"):
        hub.main(hub.Config(output=output(tmp_path / "b", "hub"), repo="owner/name", revision="a" * 40))

    def pickled(repo, *, local_dir, **_):
        Path(local_dir).mkdir(parents=True)
        (Path(local_dir) / "config.json").write_text(json.dumps({}))

    monkeypatch.setattr("huggingface_hub.snapshot_download", pickled)
    with pytest.raises(UserError, match="no safetensors weights"):
        hub.main(hub.Config(output=output(tmp_path / "c", "hub"), repo="owner/name", revision="a" * 40))


@pytest.mark.slow
def test_packaged_smollm2_is_a_working_model(tmp_path, monkeypatch):
    """The real wheel: 134.5 M parameters, float32 safetensors, a chat template, and text that is likely under it."""
    import torch

    from posttrain.study import Study

    study = Study({"tier": "tiny"})
    job = study.config("base", "packaged", ("smollm2",), seed=0, inputs={}, output=str(output(tmp_path, "packaged")))
    packaged.main(job)
    model, tokenizer = models.load(job.output), models.load_tokenizer(job.output)
    assert model.num_parameters() == 134_515_008 and {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.chat_template
    ids = tokenizer("The capital of France is Paris. The capital of Italy is", return_tensors="pt")
    with torch.inference_mode():
        assert tokenizer.decode(model(**ids).logits[0, -1].argmax()).strip() == "Rome"
    found = manifest.read(job.output)
    assert found.card["licence"] == "Apache-2.0" and "model/model.safetensors" in found.artifacts


def stopping(world, tmp_path, **options):
    path = tmp_path / "base/scratch/m/seed0/manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = Shape(hidden=32, layers=1, heads=2, intermediate=64, context=64)
    defaults = {
        "shape": shape,
        "length": 32,
        "steps": 12,
        "batch_size": 4,
        "stop_every": 3,
        "stop_items": 20,
        "max_new_tokens": 10,
    }
    return scratch.Config(output=path, mix=world.mix, tokenizer=world.tokenizer, **(defaults | options))


def test_training_stops_at_the_first_look_that_shows_the_skill(world, tmp_path, monkeypatch):
    looks = iter([0.1, 0.4, 0.62, 0.9])
    monkeypatch.setattr(scratch, "skill", lambda *_: next(looks))
    job = stopping(world, tmp_path, stop_skill=0.6, task=world.task)
    scratch.main(job)
    found = manifest.read(job.output).metrics
    assert (found["steps"].value, found["skill_at_stop"].value) == (9, 0.62)


def test_a_base_that_never_learns_is_an_error_with_a_remedy(world, tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "skill", lambda *_: 0.1)
    job = stopping(world, tmp_path, stop_skill=0.6, task=world.task)
    with pytest.raises(UserError, match=r"did not reach stop_skill 0\.6 within 12 steps; raise steps"):
        scratch.main(job)
    assert not job.output.exists()
    with pytest.raises(ValueError, match="stop_skill and task belong together"):
        stopping(world, tmp_path, stop_skill=0.6)


def test_looking_at_the_skill_changes_nothing_of_the_training(world, tmp_path):
    def weights(name, **options):
        job = stopping(world, tmp_path / name, **options)
        with contextlib.suppress(UserError):  # the watched one never reaches a skill of 1
            scratch.main(job)
        return [json.loads(line)["loss"] for line in (job.folder / "history.jsonl").read_text().splitlines()]

    assert weights("plain") == weights("watched", stop_skill=1.0, task=world.task)


def test_skill_is_the_share_of_right_answers_on_validation_items(world, tmp_path, monkeypatch):
    """Responses are replaced: every third validation item is answered rightly."""
    from posttrain.core import tables
    from posttrain.core.generation import Sample

    items = tables.read(world.task.parent / "items.parquet", None, [("split", "=", "validation")])[:30]
    answers = [[Sample([2], f"a#{item['answer'] if i % 3 == 0 else 'x'}", True)] for i, item in enumerate(items)]
    monkeypatch.setattr(scratch, "sample", lambda *_, **__: answers)
    job = stopping(world, tmp_path, stop_skill=0.6, task=world.task)
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    assert scratch.skill(model, tokenizer, items, job, "hash") == pytest.approx(1 / 3)


def test_looking_at_the_skill_leaves_the_random_state_and_the_mode(world, tmp_path):
    import torch

    from posttrain.core import tables

    items = tables.read(world.task.parent / "items.parquet", None, [("split", "=", "validation")])[:4]
    model, tokenizer = models.load(world.base), models.load_tokenizer(world.base)
    model.train()
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    scratch.skill(model, tokenizer, items, stopping(world, tmp_path, stop_skill=0.6, task=world.task), "hash")
    assert torch.equal(torch.random.get_rng_state(), before) and model.training
