"""Documents into fixed-length rows, best fit decreasing, such that no document sees another.

Positions restart at each document; Transformers builds a block-diagonal causal mask from them when it gets neither a
cache nor an attention mask. The first token of a document is never a target.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

IGNORE = -100


def split_long(documents: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Cut documents longer than `length` into pieces (each then its own document)."""
    return [doc[i : i + length] for doc in documents for i in range(0, len(doc), length)]


def overlapping(documents: Sequence[Sequence[int]], length: int, overlap: int) -> list[tuple[Sequence[int], int]]:
    """(chunk, context) of each piece; documents longer than `length` are cut so that neighbours share `overlap` tokens.

    `context` is how many leading tokens of a chunk are context alone, because the chunk before has them as targets: 0 for a
    document's first chunk, else `overlap`. With overlap >= 1 every token but a document's first is a target exactly once
    (:func:`split_long` loses one target per cut). Chunks start every length - overlap tokens; the last one is what is left,
    and so has `overlap` tokens of context as well. Raises ValueError unless 0 < overlap < length.
    """
    if not 0 < overlap < length:
        raise ValueError(f"overlap {overlap} must be above 0 and below the length {length}")
    chunks: list[tuple[Sequence[int], int]] = []
    for doc in documents:
        for start in range(0, max(len(doc) - overlap, min(len(doc), 1)), length - overlap):
            chunks.append((doc[start : start + length], overlap if start else 0))
    return chunks


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bins: lists of indices whose lengths sum to at most `capacity`. Stable for equal lengths."""
    if max(lengths, default=0) > capacity:
        raise ValueError(f"a document of {max(lengths)} tokens does not fit into {capacity}")
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(free, (lengths[index], -1))
        if at == len(free):
            bins.append([index])
            room, which = capacity - lengths[index], len(bins) - 1
        else:
            room, which = free.pop(at)
            bins[which].append(index)
            room -= lengths[index]
        bisect.insort(free, (room, which))
    return bins


def lay(
    pieces: Sequence[Sequence[int]],
    bins: Sequence[Sequence[int]],
    length: int,
    pad: int,
    known: Sequence[int] | None = None,
) -> dict[str, np.ndarray]:
    """Rows of `length` tokens, one per bin of piece numbers: input_ids, position_ids, labels, all int64 [bins, length].

    labels are the ids themselves (the model shifts them), -100 at each piece's first token, on what `known` counts as
    context at its beginning, and on padding. Padding forms one more "document" at the end of a row.
    """
    ids = np.full((len(bins), length), pad, dtype=np.int64)
    positions = np.zeros_like(ids)
    labels = np.full_like(ids, IGNORE)
    for row, members in enumerate(bins):
        at = 0
        for index in members:
            piece = np.asarray(pieces[index], dtype=np.int64)
            end, first = at + len(piece), max(1, known[index] if known else 0)
            ids[row, at:end] = piece
            positions[row, at:end] = np.arange(len(piece))
            labels[row, at + first : end] = piece[first:]
            at = end
        positions[row, at:] = np.arange(length - at)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def pack(documents: Sequence[Sequence[int]], length: int, pad: int, overlap: int = 0) -> dict[str, np.ndarray]:
    """Documents laid into rows by :func:`best_fit`; what is returned is that of :func:`lay`.

    overlap > 0: over-long documents are cut by :func:`overlapping` instead of :func:`split_long`, and labels are -100 on a
    chunk's context, too.
    """
    chunks = overlapping(documents, length, overlap) if overlap else [(piece, 0) for piece in split_long(documents, length)]
    pieces = [piece for piece, _ in chunks]
    bins = best_fit([len(piece) for piece in pieces], length)
    return lay(pieces, bins, length, pad, [context for _, context in chunks])
