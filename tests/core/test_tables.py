"""Parquet in and out."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from posttrain.core import tables
from posttrain.core.errors import UserError

ROWS = [{"id": "a", "n": 1, "ids": [1, 2]}, {"id": "b", "n": 2, "ids": []}, {"id": "c", "n": 3, "ids": [3]}]


def refused(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        tables.read(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip(tmp_path):
    path = tmp_path / "x.parquet"
    assert tables.write(ROWS, path) == path and tables.read(path) == ROWS
    assert tables.read(path, ["n"], [("id", "=", "b")]) == [{"n": 2}]
    assert tables.write(pa.Table.from_pylist(ROWS), path) and tables.read(path) == ROWS
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_same_rows_same_bytes(tmp_path):
    for name in ("a", "b"):
        tables.write(ROWS, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_columns_that_the_first_row_lacks_are_kept(tmp_path):
    tables.write([{"a": 1}, {"a": 2, "b": "x"}], tmp_path / "x")
    assert tables.read(tmp_path / "x") == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_numbers_keep_their_bits(tmp_path):
    values = [0.1 + 0.2, 1e-300, -0.0, float("-inf")]
    tables.write([{"x": v} for v in values], tmp_path / "x")
    assert [row["x"].hex() for row in tables.read(tmp_path / "x")] == [v.hex() for v in values]


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"PAR1" + b[4:-4], lambda b: b"hello world, no parquet"]
)
def test_broken_files_are_named(tmp_path, damage):
    path = tables.write(ROWS, tmp_path / "x.parquet")
    path.write_bytes(damage(path.read_bytes()))
    assert refused(path).startswith(f"{path} is not a readable parquet file (")


def test_missing_file_column_and_rows(tmp_path):
    path = tmp_path / "x.parquet"
    assert refused(path) == f"{path} does not exist; rebuild the job that writes it."
    tables.write(ROWS, path)
    assert "No match for FieldRef.Name(nope)" in refused(path, ["nope"])
    assert f"{path} has no rows for [('id', '=', 'z')]" in refused(path, None, [("id", "=", "z")])
    assert f"{path} has no rows; check" in refused(tables.write([], path))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tables.write(ROWS, tmp_path / "x.parquet")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        tables.write(ROWS[:1], path)
    assert tables.read(path) == ROWS and list(tmp_path.iterdir()) == [path]


def test_mixed_types_are_refused(tmp_path):
    with pytest.raises(pa.ArrowInvalid):
        tables.write([{"a": 1}, {"a": "x"}], tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
