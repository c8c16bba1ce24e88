"""Documents of one source in a seeded order that can be taken up at any document.

A pass goes through all shards in an order drawn from (seed, source, pass), one after the other. The rows of a shard come in
blocks of consecutive rows, shuffled inside a block by a permutation drawn from (seed, source, pass, shard, block). Both are
functions of the position: a position is a few numbers, and a resumed run opens the current shard alone, at its current
block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data.stream_sources import StreamSource, open_shards, render

if TYPE_CHECKING:
    import pyarrow

Encode = Callable[[list[str]], list[np.ndarray]]
CHARACTERS = 1 << 18  # text tokenised at once: enough for the tokenizer's own threads, little beside a block


def beginning() -> dict[str, Any]:
    """A cursor before the first document; plain JSON values."""
    zeros = ("epoch", "shard", "row", "index", "piece", "tokens", "documents", "blank", "in_pass", "per_pass")
    return {**dict.fromkeys(zeros, 0), "rows": {}}


def cut(document: np.ndarray, length: int, overlap: int = 0) -> list[np.ndarray]:
    """Pieces of at most `length` tokens; each but the first begins with the last `overlap` tokens of the one before."""
    starts = range(0, max(1, len(document) - overlap), length - overlap)
    return [document[start : start + length] for start in starts]


class Reader:
    """Pieces of documents (int32 token ids), one at a time. `cursor` is the position of the next piece and what was read up to it:

    epoch, shard (place in the pass's order), row (first of the block), index (document in the shuffled block), piece;
    tokens, documents, blank rows so far; documents in this pass and in a whole one (0: not known yet);
    rows of each finished shard.
    """

    def __init__(
        self,
        name: str,
        source: StreamSource,
        cursor: dict[str, Any],
        encode: Encode,
        length: int,
        overlap: int,
        block: int,
        seed: int,
    ):
        self.name, self.source, self.encode, self.seed = name, source, encode, seed
        self.length, self.overlap, self.block = length, overlap, block
        self.cursor = {**cursor, "rows": dict(cursor["rows"])}
        self.shards = open_shards(name, source, block)
        self.tables: Iterator[pyarrow.Table] | None = None
        self.texts: list[str] = []
        self.encoded_to = 0  # texts of the block that were tokenised
        self.block_rows = self.block_blank = 0
        self.documents: list[np.ndarray] = []  # tokenised and not begun, last one first
        self.pieces: list[np.ndarray] = []  # of the current document, last one first

    def order(self) -> list[int]:
        """Shards in the order of the current pass."""
        seed = derive(self.seed, "shards", self.name, self.cursor["epoch"])
        return np.random.default_rng(seed).permutation(len(self.shards.names)).tolist()

    def snapshot(self) -> dict[str, Any]:
        return {**self.cursor, "rows": dict(self.cursor["rows"])}

    def next(self, limit: int) -> tuple[np.ndarray, bool]:
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
