"""Commits of hub repositories: asked for once, written to a file, read by the study. The hub is a fake."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain import pin
from posttrain.core.errors import UserError
from posttrain.core.manifest import NAME
from posttrain.study import REVISIONS, Study

CONFIGS = Path(__file__).parents[1] / "configs"


class FakeApi:
    """Answers like huggingface_hub.HfApi, and remembers what it was asked."""

    def __init__(self, letter: str = "a", error: Exception | None = None) -> None:
        self.letter, self.error, self.asked = letter, error, []

    def repo_info(self, repo: str, *, repo_type: str) -> SimpleNamespace:
        self.asked.append((repo, repo_type))
        if self.error:
            raise self.error
        return SimpleNamespace(sha=self.letter * 40)


@pytest.fixture
def folder(tmp_path) -> Path:
    """configs/ with the paper tier, unpinned."""
    shutil.copytree(CONFIGS / "paper", tmp_path / "configs" / "paper", ignore=shutil.ignore_patterns(REVISIONS))
    return tmp_path / "configs"


def study(folder: Path) -> Study:
    return Study({"tier": "paper"}, folder)


def test_asks_for_models_and_data_sets_and_the_study_reads_the_answer(folder):
    api = FakeApi()
    assert study(folder).config("base", "hub", ("qwen25_1b5",), seed=0, inputs={}).revision is None
    new = pin.pin(study(folder), api)
    assert ("Qwen/Qwen2.5-1.5B", "model") in api.asked and ("PrimeIntellect/SYNTHETIC-2", "dataset") in api.asked
    assert ("sail/regmix-data", "dataset") in api.asked  # what students are distilled on
    assert set(new) == {repo for repo, _ in api.asked} and len(api.asked) == len(set(api.asked))
    found = study(folder)
    assert found.config("base", "hub", ("qwen25_1b5",), seed=0, inputs={}).revision == "a" * 40
    inputs = found.inputs("sft", "traces", ("reasoning",), 0)
    assert f"--revision {'a' * 40}" in found.flags("sft", "traces", ("reasoning",), 0, inputs, f"x/{NAME}")


def test_second_call_asks_nothing_unless_told_to(folder):
    pin.pin(study(folder), FakeApi("a"))
    text = (folder / "paper" / REVISIONS).read_text()
    again = FakeApi("b")
    assert pin.pin(study(folder), again) == {} and again.asked == []
    assert (folder / "paper" / REVISIONS).read_text() == text
    pin.pin(study(folder), again, update=True)
    assert study(folder).config("base", "hub", ("qwen3_4b",), seed=0, inputs={}).revision == "b" * 40


def test_revision_in_a_block_wins_and_is_never_asked_for(folder):
    file = folder / "paper" / "base.yaml"
    block = "{repo: Qwen/Qwen2.5-1.5B}"
    assert block in file.read_text()
    file.write_text(file.read_text().replace(block, f"{{repo: Qwen/Qwen2.5-1.5B, revision: {'c' * 40}}}"))
    api = FakeApi()
    pin.pin(study(folder), api, update=True)
    assert "Qwen/Qwen2.5-1.5B" not in [repo for repo, _ in api.asked]
    assert study(folder).config("base", "hub", ("qwen25_1b5",), seed=0, inputs={}).revision == "c" * 40


def test_commit_of_digits_alone_stays_text(folder):
    pin.write({"a/b": "1" * 40, "c/d": "1e" + "2" * 38}, folder / "paper" / REVISIONS)
    assert study(folder).revisions == {"a/b": "1" * 40, "c/d": "1e" + "2" * 38}


def test_hub_out_of_reach_is_one_sentence_and_writes_nothing(folder):
    with pytest.raises(UserError, match=r"did not tell the commit of \w+ .*no route.*network"):
        pin.pin(study(folder), FakeApi(error=ConnectionError("no route to host\nlong trace")))
    assert not (folder / "paper" / REVISIONS).exists()


@pytest.mark.parametrize("text", ["a/b: main\n", "- a/b\n", "a/b: 12\n"])
def test_broken_file_is_named(folder, text):
    (folder / "paper" / REVISIONS).write_text(text)
    with pytest.raises(UserError, match=r"revisions.yaml: .* is not a commit of 40 hex digits"):
        study(folder)


def test_model_without_a_revision_fails_at_run_time_with_the_sentence(folder, tmp_path):
    from posttrain.base import hub

    job = study(folder).config("base", "hub", ("qwen25_1b5",), seed=0, inputs={}, output=str(tmp_path / NAME))
    with pytest.raises(UserError, match="has no revision; run `make pin`"):
        hub.main(job)


def test_command_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    assert pin.main(["--tier", "papr"]) == 2
    assert "did you mean 'paper'" in capsys.readouterr().err
    pin.pin(study(folder), FakeApi())
    assert pin.main(["--tier", "paper"]) == 0
    assert "Nothing to pin" in capsys.readouterr().out
