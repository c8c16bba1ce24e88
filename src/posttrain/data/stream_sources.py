"""Where a streamed source lies and how its rows become text.

Shards are files: of a hub data set at a pinned commit, or local. They are read through the streaming builders of
`datasets`, so that nothing but what is read gets downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import field_validator

from posttrain.core.config import Model, key
from posttrain.core.errors import UserError

if TYPE_CHECKING:
    import pyarrow

SPEAKERS = {"user": "User", "human": "User", "assistant": "Assistant", "gpt": "Assistant", "system": "System"}
SUFFIXES = {"parquet": ("parquet",), "json": ("jsonl", "json", "jsonl.gz", "jsonl.zst", "json.gz", "json.zst")}


class StreamSource(Model):
    """One source: where its shards lie, which rows count, how a row becomes text, and its share of the tokens."""

    share: float = key(help="share of the token budget; the shares of all sources sum to 1", gt=0, le=1)
    repo: str | None = key(None, help="hub id of a data set, owner/name", pattern="^[^/ ]+/[^/ ]+$")
    config_name: str | None = key(None, help="repo: configuration (subset) of the data set")
    split: str = key("train", help="split of the data set")
    revision: str | None = key(None, help="repo: commit (40 hex digits)", pattern="^[0-9a-f]{40}$")
    path: Path | None = key(None, help="instead of repo: a local folder of parquet or jsonl shards, or one such file")
    files: str | None = key(None, help="glob of the shards to take, inside the data set or the folder")
    text: str | None = key(None, help="column of running text")
    question: str | None = key(None, help="column of a question; with answer: question, one newline, answer")
    answer: str | None = key(None, help="column of the answer")
    turns: str | None = key(None, help="column of chat turns ({role, content} or {from, value}), joined by one newline")
    prefix_turns: bool = key(True, help="turns: write `User: ` and `Assistant: ` before each; false: bare")
    equals: dict[str, bool | int | float | str] = key({}, help="keep rows whose column has this value")
    at_least: dict[str, float] = key({}, help="keep rows whose column is a number of at least this")
    when_exhausted: Literal["repeat", "refuse"] = key("repeat", help="after the last document: another pass, or an error")

    @field_validator("share", mode="before")
    @classmethod
    def _share_of_nothing(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("a source with a share of 0 is never read; delete it or give it a share above 0")
        return value

    def model_post_init(self, _context: Any) -> None:
        if (self.repo is None) == (self.path is None):
            raise ValueError("a source needs either repo or path; give exactly one of them")
        if (self.question is None) != (self.answer is None):
            raise ValueError("question and answer belong together; give both or neither")
        if sum(column is not None for column in (self.text, self.question, self.turns)) != 1:
            raise ValueError("a source needs text, or question and answer, or turns; give exactly one of these")

    @property
    def columns(self) -> list[str]:
        wanted = [self.text, self.question, self.answer, self.turns, *self.equals, *self.at_least]
        return list(dict.fromkeys(column for column in wanted if column is not None))

    @property
    def place(self) -> str:
        return f"{self.repo}@{self.revision[:8]}" if self.repo and self.revision else str(self.repo or self.path)


# --- shards ---------------------------------------------------------------------------------------------------


class Shards(NamedTuple):
    dataset: Any  # datasets.IterableDataset with one data source per shard
    names: list[str]  # relative to the data set or the folder

    def tables(self, shard: int, row: int, block: int) -> Iterator[pyarrow.Table]:
        """Tables of `block` rows (the last may be shorter) of one shard from `row` on.

        `iter`, unlike `__iter__`, does not divide shards among the workers of a DataLoader.
        """
        one = self.dataset.shard(self.dataset.num_shards, shard)
        return iter(one.skip(row).with_format("arrow").iter(block))


def local_files(name: str, source: StreamSource) -> tuple[str, list[Path]]:
    """(builder, files by name) of a local source."""
    path = Path(source.path)
    if not path.exists():
        raise UserError(f"source {name}: {path} does not exist; correct path or write the shards first.")
    endings = {ending: kind for kind, found in SUFFIXES.items() for ending in found}
    if path.is_file():
        found = [path]
    else:
        patterns = [source.files] if source.files else [f"*.{ending}" for ending in endings]
        found = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    kinds = {next((k for e, k in sorted(endings.items()) if file.name.endswith(f".{e}")), None) for file in found}
    if not found or len(kinds) > 1 or None in kinds:
        raise UserError(
            f"source {name}: {path / (source.files or '')} gives {len(found)} files, and shards must be all parquet or all jsonl; "
            "correct path or files."
        )
    return kinds.pop(), found


def open_shards(name: str, source: StreamSource, block: int) -> Shards:
    """List the shards and check the columns; no rows are read. A :class:`UserError` says what is wrong with the source."""
    from datasets import load_dataset_builder

    path, files = source.repo, [source.files] if source.files else None
    if path is None:
        path, found = local_files(name, source)
        files = [str(file.resolve()) for file in found]
    elif source.revision is None:
        raise UserError(f"source {name}: {path} has no revision; run `make pin` once with network access.")
    try:
        builder = load_dataset_builder(
            path, source.config_name, data_files={source.split: files} if files else None, revision=source.revision
        )
        if hasattr(builder.config, "batch_size"):
            builder.config.batch_size = block  # not whole row groups; an empty shard has none to take the size from
        dataset = builder.as_streaming_dataset(split=source.split)
        there = list(dataset.column_names or source.columns)
        missing = [column for column in source.columns if column not in there]
        if not missing and hasattr(builder.config, "columns"):
            builder.config.columns = source.columns  # parquet: other columns are not even fetched
            dataset = builder.as_streaming_dataset(split=source.split)
    except Exception as error:  # the hub, file systems and readers each have their own kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"source {name}: {source.place} could not be opened ({reason}); check repo, config_name, split, files, access rights (`hf auth login`) and network."
        ) from None
    if missing:
        raise UserError(f"source {name}: {source.place} has no column {missing[0]!r}; its columns are {', '.join(there)}.")
    paths = list((builder.config.data_files or {}).get(source.split, []))
    if len(paths) != dataset.num_shards:
        paths = [f"shard {i}" for i in range(dataset.num_shards)]  # archives that the builder divides itself
    root = str(Path(source.path).resolve()) if source.path else f"hf://datasets/{source.repo}@{source.revision}"
    single = source.path is not None and Path(source.path).is_file()
    return Shards(dataset, [Path(p).name if single else p.removeprefix(f"{root}/") for p in paths])


# --- rows into text -------------------------------------------------------------------------------------------


def keep(source: StreamSource, table: pyarrow.Table) -> np.ndarray:
    """Row numbers (int64) that pass the filters. A missing value passes none. Raises on a column that cannot be compared."""
    import pyarrow as pa
    import pyarrow.compute as pc

    mask = np.ones(len(table), dtype=bool)
    for column, value in source.equals.items():
        cells = table[column]
        found = pc.equal(cells, pa.scalar(value).cast(cells.type))
        mask &= pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    for column, least in source.at_least.items():
        found = pc.greater_equal(pc.cast(table[column], pa.float64()), least)
        mask &= pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return np.flatnonzero(mask)


def turn(message: dict[str, Any], prefixed: bool) -> str:
    """One chat turn as text: `User: ...`. Raises KeyError on a speaker that has no name here, TypeError on other content."""
    role, content = (message.get(a) or message.get(b) for a, b in (("role", "from"), ("content", "value")))
    if not isinstance(content, str | None):
        raise TypeError(f"a turn holds {type(content).__name__}")
    return f"{SPEAKERS[role]}: {content or ''}" if prefixed else content or ""


def render(name: str, source: StreamSource, table: pyarrow.Table, shard: str, row: int) -> list[str]:
    """The text of every row that passes the filters; blank where a cell is missing or empty. `row` is the first's number."""
    try:
        kept = keep(source, table)
    except Exception as error:  # Arrow's many kinds
        reason = str(error).splitlines()[0]
        raise UserError(
            f"source {name}, {shard} rows {row} to {row + len(table) - 1}: equals or at_least cannot be compared with a column ({reason}); correct the filter."
        ) from None
    wanted = [source.turns] if source.turns else [source.text] if source.text else [source.question, source.answer]
    texts = []
    for i, *cells in zip(kept, *(table[column].take(kept).to_pylist() for column in wanted), strict=True):
        try:
            if source.turns:
                texts.append("\n".join(turn(message, source.prefix_turns) for message in cells[0] or ()))
            else:
                texts.append("" if any(cell is None or not cell.strip() for cell in cells) else "\n".join(cells))
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"source {name}, {shard} row {row + i}: {' and '.join(wanted)} hold {type(cells[0]).__name__} that does not read as "
                f"{'chat turns' if source.turns else 'text'} ({error}); name other columns or filter such rows."
            ) from None
    return texts
