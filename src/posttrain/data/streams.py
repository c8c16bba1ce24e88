"""Token mixes that are streamed: shares of tokens, packed rows, and a position that can be saved and taken up exactly.

Which source gives the next piece (a document, or a part of one longer than a row) is no draw but a rule: the source with the
fewest tokens for its share. Realised shares then differ from the configured ones by less than one row's tokens over all
tokens, whatever the lengths of documents. Pieces are packed in windows of about `window` rows by best-fit decreasing, as
`packing.pack` does for a whole corpus, and the rows of a window are shuffled. A window leaves nothing open, so the
position after any row is where its window began, in each source, and how many rows of it were taken: some hundred bytes
per source, and at most one window is read again. Sources: PRISM (arXiv 2603.17074), Method 1, 2 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posttrain.core import manifest
from posttrain.core.config import Model, digest, key
from posttrain.core.determinism import derive
from posttrain.core.errors import UserError
from posttrain.data import packing
from posttrain.data.packed import vocabulary
from posttrain.data.stream_reader import Reader, beginning
from posttrain.data.stream_sources import StreamSource, open_shards

VERSION = 1


class StreamConfig(Model):
    """What a stream is made of. With a seed and a tokenizer it determines every row."""

    sources: dict[str, StreamSource] = key(help="name of each source -> where its shards lie and its share")
    tokens: int = key(help="budget of tokens in rows, over all sources, padding not counted", gt=0)
    length: int = key(help="tokens per row", gt=1)
    packing: bool = key(True, help="several documents per row, blind to each other; false: one per row, padded")
    overlap: int = key(0, help="tokens that the parts of a document longer than a row share (they are trained on twice)", ge=0)
    window: int = key(256, help="rows packed and shuffled together; a resumed run reads at most so many again", gt=0)
    block: int = key(1024, help="consecutive rows of a shard that are shuffled together", gt=0)

    def model_post_init(self, _context: Any) -> None:
        if not self.sources:
            raise ValueError("sources is empty; name at least one source")
        total = sum(source.share for source in self.sources.values())
        if abs(total - 1) > 1e-9:
            raise ValueError(f"the shares of sources sum to {total:g}, not 1; correct them")
        if self.overlap >= self.length:
            raise ValueError(f"overlap {self.overlap} is not below length {self.length}; lower it")


class Window(NamedTuple):
    """Rows that were packed together. `record` is plain JSON: where the window begins and ends in every source, and what each
    row holds; `skip` rows were taken before the state that was loaded."""

    record: dict[str, Any]
    arrays: dict[str, np.ndarray]
    skip: int


def state_at(record: dict[str, Any], row: int) -> dict[str, Any]:
    """The state after `row` rows of the stream, of which the last lies in the window of `record` (or `row` is its begin)."""
    taken = row - record["row"]
    if not 0 <= taken <= len(record["counts"]):
        raise ValueError(f"row {row} is outside the window of {len(record['counts'])} rows at {record['row']}")
    whole = taken == len(record["counts"])
    base = record["end"] if whole else record["begin"]
    consumed = {name: [cursor["tokens"], cursor["documents"]] for name, cursor in base["sources"].items()}
    for counts in [] if whole else record["counts"][:taken]:
        for name, (tokens, documents) in counts.items():
            consumed[name] = [consumed[name][0] + tokens, consumed[name][1] + documents]
    skip = 0 if whole else taken
    return {"version": VERSION, "settings": record["settings"], "row": row, "skip": skip, "base": base, "consumed": consumed}


class TokenStream:
    """Rows of a mix: iterate for {input_ids, position_ids, labels}, each int64 [length].

    `state_dict()` is the position after the rows taken so far, as JSON values; a stream of the same configuration that loads
    it goes on with the next row. Iterating again goes on from there as well, it does not begin anew.
    """

    def __init__(self, config: StreamConfig, tokenizer: Any, seed: int):
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no EOS token, which ends every document; choose another."
            )
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self.settings = {**config.model_dump(mode="json"), "seed": seed, "vocabulary": vocabulary(tokenizer)}
        begin = {"window": 0, "row": 0, "sources": {name: beginning() for name in sorted(config.sources)}}
        self._loaded = state_at({"settings": self.settings, "row": 0, "begin": begin, "end": begin, "counts": []}, 0)
        self._taken: tuple[dict[str, Any], int] | None = None  # (record, row) since the state was loaded

    # --- position ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._loaded if self._taken is None else state_at(*self._taken)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the row of `state`. A :class:`UserError` names the first setting that differs."""
        if state.get("version") != VERSION:
            raise UserError(f"the stream's state has version {state.get('version')}, this code reads {VERSION}; start anew.")
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise UserError(
                    f"the stream's state was written with another `{name}`; restore it, or delete the checkpoints and start anew."
                )
        self._loaded, self._taken = state, None

    # --- rows -------------------------------------------------------------------------------------------------

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """int32 token ids of each text, without special tokens, and EOS."""
        found = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.array([*ids, self.tokenizer.eos_token_id], dtype=np.int32) for ids in found]

    def check(self) -> None:
        """Open every source and list its shards, so that a wrong one is named before anything is trained."""
        for name, source in self.config.sources.items():
            open_shards(name, source, self.config.block)

    def _reader(self, name: str, cursor: dict[str, Any]) -> Reader:
        c = self.config
        reader = Reader(name, c.sources[name], cursor, self.encode, c.length, c.overlap, c.block, self.seed)
        names = digest(reader.shards.names)[:16]
        if reader.cursor.setdefault("shards", names) != names:
            raise UserError(
                f"source {name}: {c.sources[name].place} no longer has the shards that the saved state was written with; restore them."
            )
        return reader

    def windows(self) -> Iterator[Window]:
        """Windows from the loaded state on; the first is packed again if some of its rows were taken."""
        c, state = self.config, self.state_dict()
        skip, at = state["skip"], state["base"]
        readers = {name: self._reader(name, cursor) for name, cursor in at["sources"].items()}
        pad = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        number, row = at["window"], at["row"]
        while True:
            begin = {"window": number, "row": row, "sources": {name: reader.snapshot() for name, reader in readers.items()}}
            left = c.tokens - sum(reader.cursor["tokens"] for reader in readers.values())
            room, pieces, owners = min(left, c.window * c.length), [], []
            while room > 0 and (c.packing or len(pieces) < c.window):
                # Fewest tokens for its share; of equals the first by name.
                name = min(readers, key=lambda n: (readers[n].cursor["tokens"] / c.sources[n].share, n))
                piece, begins = readers[name].next(left)
                pieces.append(piece)
                owners.append((name, begins))
                left, room = left - len(piece), room - len(piece)
            if not pieces:
                return
            bins = packing.best_fit([len(p) for p in pieces], c.length) if c.packing else [[i] for i in range(len(pieces))]
            # Best-fit decreasing sorts by length, and lengths differ between sources: batches must not.
            order = np.random.default_rng(derive(self.seed, "window", number)).permutation(len(bins))
            bins = [bins[i] for i in order]
            counts: list[dict[str, list[int]]] = [{} for _ in bins]
            for held, members in zip(counts, bins, strict=True):
                for i in members:
                    name, begins = owners[i]
                    tokens, documents = held.get(name, (0, 0))
                    held[name] = [tokens + len(pieces[i]), documents + begins]
            number, row = number + 1, row + len(bins)
            end = {"window": number, "row": row, "sources": {name: reader.snapshot() for name, reader in readers.items()}}
            record = {"settings": self.settings, "row": begin["row"], "begin": begin, "end": end, "counts": counts}
            yield Window(record, packing.lay(pieces, bins, c.length, pad), skip)
            skip = 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for window in self.windows():
            for i in range(window.skip, len(window.record["counts"])):
                self._taken = (window.record, window.record["row"] + i + 1)
                yield {name: array[i] for name, array in window.arrays.items()}

    # --- report -----------------------------------------------------------------------------------------------

    def realised(self) -> dict[str, dict[str, Any]]:
        """What the rows taken so far were made of, per source, for a manifest's card; see `realised`."""
        return realised(self.config, self.state_dict(), self._taken[0] if self._taken else None)


def realised(config: StreamConfig, state: dict[str, Any], record: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Per source: tokens and documents in the rows taken, the share of all tokens; and, as far as the last of these rows'
    window (`record`) was read, epochs (passes; before the first is complete, of shards), blank rows and every shard.

    A shard has its name, the rows read of it and whether these are all. A local one has the sha256 of its content (up to
    1 GiB); one of the hub is given by its name and the source's revision.
    """
    total = sum(tokens for tokens, _ in state["consumed"].values())
    reached = (record["end"] if record else state["base"])["sources"]
    found = {}
    for name, (tokens, documents) in state["consumed"].items():
        source, cursor = config.sources[name], reached[name]
        names = open_shards(name, source, config.block).names
        rows: dict[int, tuple[int, bool]] = {int(shard): (count, True) for shard, count in cursor["rows"].items()}
        if cursor["documents"] and cursor["shard"] < len(names):
            order = np.random.default_rng(derive(state["settings"]["seed"], "shards", name, cursor["epoch"])).permutation(
                len(names)
            )
            rows.setdefault(int(order[cursor["shard"]]), (cursor["row"], False))
        part = cursor["in_pass"] / cursor["per_pass"] if cursor["per_pass"] else cursor["shard"] / len(names)
        found[name] = {
            "tokens": tokens,
            "share": tokens / total if total else 0.0,
            "documents": documents,
            "epochs": round(cursor["epoch"] + part, 4),
            "blank": cursor["blank"],
            "place": source.place,
            "revision": source.revision,
            "shards": [
                {"name": names[i], "rows": count, "complete": done, **content(source, names[i])}
                for i, (count, done) in sorted(rows.items())
            ],
        }
    return found


def content(source: StreamSource, shard: str) -> dict[str, str]:
    if source.path is None:
        return {}
    file = Path(source.path) if Path(source.path).is_file() else Path(source.path) / shard
    return {"sha256": manifest.sha256(file)} if file.is_file() and file.stat().st_size <= 2**30 else {}
