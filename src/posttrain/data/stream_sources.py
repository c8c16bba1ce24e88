"""Documents of one source of a token mix, in a seeded order that can be taken up at any document.

Shards are files: of a hub data set at a pinned commit, or local. They are read one after the other through the streaming
builders of `datasets`, so that nothing but what is read gets downloaded. A pass goes through all shards in an order drawn
from (seed, source, pass); the rows of a shard come in blocks of consecutive rows, shuffled inside a block by a permutation
drawn from (seed, source, pass, shard, block). Both are functions of the position, so that a position is a few numbers
and a resumed run opens the current shard alone, at its current block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import field_validator

from posttrain.core.config import Model, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError

if TYPE_CHECKING:
    import pyarrow

Encode = Callable[[list[str]], list[list[int]]]
CHARACTERS = 1 << 18  # text tokenised at once: enough for the tokenizer's own threads, little beside a block
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

    words: dict[str, Any] = {}
    if source.repo is None:
        kind, found = local_files(name, source)
        words = {"path": kind, "data_files": {source.split: [str(file.resolve()) for file in found]}}
    elif source.revision is None:
        raise UserError(f"source {name}: {source.repo} has no revision; run `make pin` once with network access.")
    else:
        words = {"path": source.repo, "name": source.config_name, "revision": source.revision}
        words |= {"data_files": {source.split: source.files}} if source.files else {}
    try:
        builder = load_dataset_builder(**words)
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


def keep(source: StreamSource, table: pyarrow.Table) -> list[int]:
    """Row numbers that pass the filters. A missing value passes none. Raises on a column that cannot be compared."""
    import numpy as np
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
    return np.flatnonzero(mask).tolist()


def turn(message: dict[str, Any], prefixed: bool) -> str:
    role, content = (message.get(a) or message.get(b) for a, b in (("role", "from"), ("content", "value")))
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


# --- reading --------------------------------------------------------------------------------------------------


def beginning() -> dict[str, Any]:
    """A cursor before the first document; plain JSON values."""
    zeros = ("epoch", "shard", "row", "index", "piece", "tokens", "documents", "blank", "in_pass", "per_pass")
    return {**dict.fromkeys(zeros, 0), "rows": {}}


def cut(document: list[int], length: int, overlap: int = 0) -> list[list[int]]:
    """Pieces of at most `length` tokens; each but the first begins with the last `overlap` tokens of the one before."""
    starts = range(0, max(1, len(document) - overlap), length - overlap)
    return [document[start : start + length] for start in starts]


class Reader:
    """Pieces of documents, one at a time. `cursor` is the position of the next piece and what was read up to it:

    epoch, shard (place in the pass's order), row (first of the block), index (document in the shuffled block), piece;
    tokens, documents, blank rows so far; documents in this pass and in a whole one (0: not known yet);
    rows of each finished shard.
    """

    def __init__(
        self, name: str, source: StreamSource, cursor: dict[str, Any], encode: Encode, length: int, overlap: int, block: int, seed: int
    ):
        self.name, self.source, self.encode, self.seed = name, source, encode, seed
        self.length, self.overlap, self.block = length, overlap, block
        self.cursor = {**cursor, "rows": dict(cursor["rows"])}
        self.shards = open_shards(name, source, block)
        self.tables: Iterator[pyarrow.Table] | None = None
        self.texts: list[str] = []
        self.encoded_to = 0  # texts of the block that were tokenised
        self.block_rows = self.block_blank = 0
        self.documents: list[list[int]] = []  # tokenised and not begun, last one first
        self.pieces: list[list[int]] = []  # of the current document, last one first

    def order(self) -> list[int]:
        """Shards in the order of the current pass."""
        import numpy as np

        seed = derive(self.seed, "shards", self.name, self.cursor["epoch"])
        return np.random.default_rng(seed).permutation(len(self.shards.names)).tolist()

    def snapshot(self) -> dict[str, Any]:
        return {**self.cursor, "rows": dict(self.cursor["rows"])}

    def next(self, limit: int) -> tuple[list[int], bool]:
        """(token ids of the next piece, whether it begins a document); cut to `limit`, which ends the stream."""
        while not self.pieces:
            self._document()
        at, piece = self.cursor, self.pieces.pop()[:limit]
        begins = at["piece"] == 0
        at["tokens"] += len(piece)
        at["documents"] += begins
        at["in_pass"] += begins
        at["piece"] += 1
        if not self.pieces:
            at["index"], at["piece"] = at["index"] + 1, 0
        return piece, begins

    def _document(self) -> None:
        """Take the next document into `pieces`, or bring one nearer."""
        if self.documents:
            pieces = cut(self.documents.pop(), self.length, self.overlap)
            self.pieces = pieces[self.cursor["piece"] :][::-1]
        elif self.encoded_to < len(self.texts):
            start, size = self.encoded_to, 0
            while self.encoded_to < len(self.texts) and size < CHARACTERS:
                size += len(self.texts[self.encoded_to])
                self.encoded_to += 1
            self.documents = self.encode(self.texts[start : self.encoded_to])[::-1]
        else:
            self._block()

    def _block(self) -> None:
        import numpy as np

        at = self.cursor
        at["row"] += self.block_rows
        at["blank"] += self.block_blank
        at["index"] = 0 if self.block_rows else at["index"]  # a resumed reader has no block yet
        self.texts, self.block_rows, self.block_blank, self.encoded_to = [], 0, 0, 0
        shard = self.order()[at["shard"]]
        try:
            self.tables = self.tables or self.shards.tables(shard, at["row"], self.block)
            table = next(self.tables, None)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"source {self.name}: shard {self.shards.names[shard]} cannot be read from row {at['row']} on ({reason}); repair it or leave it out with files."
            ) from None
        if table is None:
            self._end_of_shard(shard)
            return
        texts = render(self.name, self.source, table, self.shards.names[shard], at["row"])
        found = [text for text in texts if text.strip()]
        self.block_rows, self.block_blank, self.encoded_to = len(table), len(texts) - len(found), at["index"]
        rng = np.random.default_rng(derive(self.seed, "rows", self.name, at["epoch"], shard, at["row"]))
        self.texts = [found[i] for i in rng.permutation(len(found))]

    def _end_of_shard(self, shard: int) -> None:
        at, self.tables = self.cursor, None
        if not at["row"]:
            raise UserError(
                f"source {self.name}: shard {self.shards.names[shard]} has no rows; write it again or leave it out with files."
            )
        at["rows"][str(shard)] = at["row"]
        at["shard"], at["row"] = at["shard"] + 1, 0
        if at["shard"] < len(self.shards.names):
            return
        if not at["in_pass"]:
            raise UserError(
                f"source {self.name}: no row of {self.source.place} is left after the filters and blank texts; relax equals and at_least or name another column."
            )
        if self.source.when_exhausted == "refuse":
            raise UserError(
                f"source {self.name} ran out after {at['documents']} documents and {at['tokens']} tokens, before the budget was met; set when_exhausted: repeat, or lower its share or tokens."
            )
        at["epoch"], at["shard"], at["per_pass"], at["in_pass"] = at["epoch"] + 1, 0, at["in_pass"], 0
