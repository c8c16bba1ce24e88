"""What every module's command line promises: help, sentences, exit codes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Literal

import pytest

from posttrain.core import cli
from posttrain.core.config import JobConfig, Model, key
from posttrain.core.errors import TimeLimitReached, UserError


class Inner(Model):
    width: int = key(3, help="w", gt=0)


class Config(JobConfig):
    """Not shown: the module's docstring is."""

    steps: int = key(100, help="optimizer steps, 100 % of them", gt=0)
    rate: float = key(1e-3, help="learning rate")
    style: Literal["hash", "boxed"] = key("hash", help="answer style")
    pair: tuple[float, float] = key((0.0, 1.0), help="bounds")
    inner: Inner = key(Inner(), help="nested")
    options: dict[str, Any] = key({}, help="anything")
    limit: float | None = key(None, help="minutes", role="runtime")
    text: str = key("x", help="words")
    start: Path = key(help="manifest", role="input")


def parse(*words: str) -> Config:
    return cli.parse(Config, ["--output", "o", "--start", "s", *words], "posttrain.x.y")


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*words)
    return str(caught.value)


@pytest.fixture
def words(tmp_path) -> list[str]:
    output = tmp_path / "results" / "tiny" / "sft" / "train" / "arm" / "seed0" / "manifest.json"
    return ["--output", str(output), "--start", "s"]


def run(words: list[str], main=lambda job: None) -> int:
    return cli.run(Config, main, words)


def fails(error: BaseException):
    def main(_job):
        raise error

    return main


def test_values_of_every_kind():
    found = parse(
        *("--steps", "7", "--rate", "1e-5", "--style", "boxed", "--pair", "[-1, 2]", "--inner", '{"width": 4}'),
        *("--options", '{"a": [1, null]}', "--limit", "null", "--text", "null", "--seed=3"),
    )
    assert (found.steps, found.rate, found.style, found.pair, found.inner.width) == (7, 1e-5, "boxed", (-1.0, 2.0), 4)
    assert (found.options, found.limit, found.text, found.seed, found.start) == ({"a": [1, None]}, None, "null", 3, Path("s"))
    assert parse("--limit", "2.5").limit == 2.5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--stpes", "3"), "--stpes is not a flag of posttrain.x.y; did you mean '--steps'?"),
        (("--step", "3"), "--step is not a flag of posttrain.x.y; did you mean '--steps'?"),  # no silent abbreviation
        (("loose",), "loose is not a flag of posttrain.x.y"),
        (("--steps", "many"), "posttrain.x.y: steps = 'many': input should be a valid integer"),
        (("--steps", "null"), "posttrain.x.y: steps = 'null': "),
        (("--steps", "1e5"), "write the number without quotes"),
        (("--steps", "0"), "greater than 0"),
        (("--style", "box"), "did you mean 'boxed'?"),
        (("--pair", "1,2"), "--pair: "),
        (("--pair", "1,2"), "give valid JSON, for example '[1, 2]'"),
        (("--inner", '{"wdith": 1}'), "inner.wdith is not a known key; did you mean 'width'?"),
        (("--inner", '{"width": 0}'), "inner.width = 0"),
        (("--options", "3"), "options = 3"),
    ],
)
def test_wrong_flags_are_one_sentence(given, sentence):
    found = refused(*given)
    assert sentence in found and "\n" not in found


def test_missing_flag():
    with pytest.raises(UserError, match="start is required"):
        cli.parse(Config, ["--output", "o"], "m")


def test_flag_without_value(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--steps")
    assert caught.value.code == 2 and "--steps: expected one argument" in capsys.readouterr().err


def test_help_shows_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0 and "What every module's command line promises" in shown
    for name in Config.model_fields:
        assert f"--{name}" in shown
    for piece in (
        "100 % of them [setting, default 100]",
        "{hash,boxed}",
        "[input, required]",
        "[runtime, default None]",
        "default (0.0, 1.0), JSON]",
    ):
        assert piece in shown


def test_success(words, tmp_path):
    seen = []
    assert run([*words, "--steps", "5"], seen.append) == 0
    assert seen[0].steps == 5 and seen[0].folder.is_dir()


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("key x is wrong; change it."), 2, "error: key x is wrong; change it.\n"),
        (
            TimeLimitReached("stopped after 3 minutes."),
            75,
            "error: stopped after 3 minutes. Run the same command again to continue.\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/full/x"),
            2,
            "error: cannot write /full/x: No space left on device; free space",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2, "seed0: Disk quota exceeded; free space"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "error: cannot write /x: Permission denied"),
        (
            RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)"),
            2,
            "No space left on device; free space",
        ),
    ],
)
def test_what_a_user_can_act_on_is_one_sentence_and_a_code(words, capsys, error, code, sentence):
    assert run(words, fails(error)) == code
    shown = capsys.readouterr().err
    assert sentence in shown and shown.count("\n") == 1 and "Traceback" not in shown


@pytest.mark.parametrize(
    "error", [ValueError("bug"), FileNotFoundError(errno.ENOENT, "missing"), KeyboardInterrupt(), ConnectionError("x")]
)
def test_bugs_are_not_hidden(words, error):
    with pytest.raises(type(error)):
        run(words, fails(error))


def test_wrong_flag_stops_before_any_work(words, capsys):
    assert run([*words, "--stepz", "1"], fails(AssertionError("must not run"))) == 2
    assert capsys.readouterr().err.startswith("error: --stepz is not a flag of ")
    assert not Path(words[1]).parent.exists()


@pytest.mark.parametrize(
    ("output", "seed", "sentence"),
    [
        ("seed0/manifest.json", "1", "error: --seed 1 and the folder seed0 of --output differ"),
        ("seedling/manifest.json", "0", "give a path that ends in <stage>/<method>/<variant>/seed<k>/manifest.json"),
        ("seed0/result.json", "0", "give a path that ends in"),
        ("0/manifest.json", "0", "give a path that ends in"),
    ],
)
def test_output_that_could_not_be_published_stops_before_any_work(tmp_path, capsys, output, seed, sentence):
    path = tmp_path / "sft" / "train" / "arm" / output
    assert run(["--output", str(path), "--start", "s", "--seed", seed], fails(AssertionError("must not run"))) == 2
    assert sentence in capsys.readouterr().err and not path.parent.exists()


def test_other_outputs_than_manifests_are_free(tmp_path):
    assert run(["--output", str(tmp_path / "claims.csv"), "--start", "s"]) == 0


def test_folder_that_is_a_file(words, capsys):
    folder = Path(words[1]).parent
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    assert run(words, fails(AssertionError("must not run"))) == 2
    assert f"{folder} cannot be created" in capsys.readouterr().err


def test_read_only_folder(words, capsys):
    folder = Path(words[1]).parent
    folder.mkdir(parents=True)
    os.chmod(folder, 0o555)
    assert run(words, fails(AssertionError("must not run"))) == 2
    assert f"{folder} is not writable; change its owner or permissions" in capsys.readouterr().err
