"""The text whose likelihood an edit shall keep: read from a corpus, cut into token sequences, checked against the edits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from posttrain.core import manifest, tables
from posttrain.core.errors import UserError
from posttrain.edit.edits import Edit, mentions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Text(NamedTuple):
    id: str
    source: str
    ids: tuple[int, ...]
    text: str


def read(
    corpus: Path, split: str, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, sources: Sequence[str] = ()
) -> list[Text]:
    """The first `count` documents of a split, of each source alike if sources are named, cut to `tokens` tokens each.

    Documents of fewer than two tokens are left out: they predict nothing.
    """
    manifest.read(corpus)
    rows = tables.read(corpus.parent / "documents.parquet", ["id", "source", "text"], [("split", "=", split)])
    found: list[Text] = []
    groups = {name: [row for row in rows if row["source"] == name] for name in sources} if sources else {"": rows}
    for name, group in groups.items():
        if not group:
            raise UserError(f"{corpus} has no document of the source '{name}' in split {split}; correct drift_sources.")
        part: list[Text] = []
        for row in group:
            if len(part) == count:
                break
            ids = tokenizer(row["text"][: tokens * 40], truncation=True, max_length=tokens)["input_ids"]
            if len(ids) > 1:
                part.append(Text(row["id"], row["source"], tuple(ids), row["text"]))
        if len(part) < count:
            which = f"source '{name}' in split" if name else "split"
            print(f"note: {which} {split} of {corpus} has {len(part)} texts, fewer than the {count} asked for.", file=sys.stderr)
        found += part
    if not found:
        raise UserError(f"split {split} of {corpus} has no text of two tokens or more; give another corpus.")
    return found


def seen(text: Text, tokenizer: PreTrainedTokenizerBase) -> str:
    """The part of a document that the cut leaves."""
    return tokenizer.decode(list(text.ids), skip_special_tokens=True)


def warn_of_edits(edits: Sequence[Edit], texts: Sequence[Text], tokenizer: PreTrainedTokenizerBase, corpus: Path) -> int:
    """How many of the texts state an edited fact; one warning on stderr if any does."""
    count = mentions(edits, [seen(t, tokenizer) for t in texts])
    if count:
        print(
            f"warning: {count} of {len(texts)} capability texts of {corpus} state an edited fact, so what is to change is protected "
            "there; take them out, or edit other facts.",
            file=sys.stderr,
        )
    return count
