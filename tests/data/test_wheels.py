"""Pinned wheels: checked, cached, and one sentence when the network or the pin is wrong."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from posttrain.core.errors import UserError
from posttrain.core.manifest import sha256
from posttrain.data import wheels
from posttrain.data.wheels import Wheel, fetch, members


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def build(folder: Path, name: str = "some_data-1.2-py3-none-any.whl", text: str = "text") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in ("data/b.txt", "data/a.txt", "data/c.md", "other/a.txt", "data.txt"):
            archive.writestr(zipfile.ZipInfo(file), f"{text} of {file}")
    return folder / name


def pin(path: Path, **values) -> Wheel:
    return Wheel(**{"package": "some-data", "version": "1.2", "sha256": sha256(path), "licence": "MIT", **values})


class Pip:
    """Stands for subprocess.run; leaves a wheel in the cache or fails."""

    def __init__(self, cache: Path, code: int = 0, stderr: str = "", name: str | None = None) -> None:
        self.cache, self.code, self.stderr, self.name, self.calls = cache, code, stderr, name, []

    def __call__(self, words, **options):
        self.calls.append(words)
        if self.name:
            build(self.cache, self.name)
        return subprocess.CompletedProcess(words, self.code, "", self.stderr)


@pytest.fixture
def pip(cache, monkeypatch):
    def install(**options) -> Pip:
        found = Pip(cache, **options)
        monkeypatch.setattr(wheels.subprocess, "run", found)
        return found

    return install


def refused(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        fetch(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_cached_wheel_needs_no_pip(cache, pip):
    path, called = build(cache), pip(code=1)
    assert fetch(pin(path), cache) == path and called.calls == []


def test_download_is_pinned_alone_and_without_building(cache, pip, tmp_path):
    called = pip(name="some_data-1.2-py3-none-any.whl")
    wanted = pin(build(tmp_path / "there"))
    assert fetch(wanted, cache) == cache / "some_data-1.2-py3-none-any.whl"
    words = called.calls[0]
    assert (
        words[1:4] == ["-m", "pip", "download"]
        and words[-1] == "some-data==1.2"
        and words[words.index("--dest") + 1] == str(cache)
    )
    assert {"--no-deps", "--only-binary=:all:"} <= set(words)
    assert fetch(wanted, cache) and len(called.calls) == 1


def test_another_version_in_the_cache_is_not_taken(cache, pip, tmp_path):
    build(cache, "some_data-1.20-py3-none-any.whl", "newer")
    called = pip(name="some_data-1.2-py3-none-any.whl")
    assert fetch(pin(build(tmp_path / "there")), cache).name == "some_data-1.2-py3-none-any.whl" and called.calls


def test_wrong_digest_is_named(cache, pip):
    path = build(cache)
    pip(code=1)
    assert (
        refused(pin(path, sha256="0" * 64), cache)
        == f"{path} does not have the pinned sha256 000000000000…; delete it and run again."
    )


def test_truncated_wheel_is_named(cache, pip):
    path = build(cache)
    wanted = pin(path)
    pip(code=1)
    path.write_bytes(path.read_bytes()[:-10])
    assert str(path) in refused(wanted, cache)


def test_downloaded_wheel_is_checked_too(cache, pip, tmp_path):
    pip(name="some_data-1.2-py3-none-any.whl")
    assert "does not have the pinned sha256" in refused(pin(build(tmp_path / "there"), sha256="1" * 64), cache)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"code": 1, "stderr": "WARNING: Retrying\nERROR: No matching distribution found for some-data==1.2\n"},
            "ERROR: No matching distribution found for some-data==1.2",
        ),
        ({"code": 1, "stderr": ""}, "no wheel arrived"),
        ({"code": 1, "stderr": "ERROR: interrupted", "name": "some_data-1.2-py3-none-any.whl"}, "ERROR: interrupted"),
        ({"code": 0, "stderr": ""}, "no wheel arrived"),
    ],
)
def test_pip_that_fails_is_one_sentence(cache, pip, tmp_path, options, reason):
    pip(**options)
    assert refused(pin(build(tmp_path / "there")), cache) == (
        f"pip could not download some-data==1.2 ({reason}); connect to a package index, or put the wheel into {cache}."
    )


def test_members_are_sorted_and_filtered(tmp_path):
    path = build(tmp_path)
    assert members(path, "data/", ".txt") == [("data/a.txt", b"text of data/a.txt"), ("data/b.txt", b"text of data/b.txt")]
    assert members(path, "other/a.txt", "") == [("other/a.txt", b"text of other/a.txt")]
    with pytest.raises(UserError, match=r"holds no file data/….csv; check prefix and suffix"):
        members(path, "data/", ".csv")


@pytest.mark.parametrize("value", ["0" * 63, "0" * 65, "G" * 64, "A" * 64, ""])
def test_digest_must_be_a_sha256(value):
    with pytest.raises(ValueError, match="sha256"):
        Wheel(package="p", version="1", sha256=value, licence="MIT")
