"""Packing of token ids into rows: the documents of a split are concatenated and cut into rows of equal length.

A row has one token more than the model's input and starts with the last token of the row before. So every token of a
split is a target once, except those of an incomplete last row. Conversations already are rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from slipstream.pipeline.prepare.language.encode import EncodedChunk
from slipstream.pipeline.prepare.shuffle import RunWriter, SortedRun, order_keys
from slipstream.shared.artifacts.prepared.data import SPLITS, Signature

#: Number of tokens of a chunk read at once.
AT_ONCE = 4 << 20


def row_counts(pieces: list[EncodedChunk], length: int) -> list[int]:
    """Return the number of full rows in every split; an end token is added before the first document."""
    return [sum(piece.tokens[split] for piece in pieces) // length for split in range(len(SPLITS))]


def pack_rows(
    path: Path, pieces: list[EncodedChunk], signature: Signature, end: int | None, *, shuffle: bool
) -> list[SortedRun]:
    """Write the rows of all splits as sorted runs ``path``; if ``end`` is None, the rows are conversations."""
    (length,), token = signature.inputs[0].shape, np.dtype(signature.inputs[0].dtype)
    width = 1 if end is not None else length + 1
    total = sum(row_counts(pieces, length)) if end is not None else stored_rows(pieces, width * token.itemsize)
    first = 0
    with RunWriter(path) as writer:
        for split in range(len(SPLITS)):
            parts = tokens_of([piece.path(split) for piece in pieces], token, width)
            rows_of = (
                pack_tokens(parts, length, end, token) if end is not None else (p.reshape(-1, width) for p in parts)
            )
            for rows in rows_of:
                order = order_keys(first, len(rows), total, shuffle)
                records = rows.view(signature.record).reshape(len(rows))
                writer.add(split, np.arange(len(rows)), order, records)
                first += len(rows)
    return writer.runs


def stored_rows(pieces: list[EncodedChunk], size: int) -> int:
    return sum(piece.path(split).stat().st_size for piece in pieces for split in range(len(SPLITS))) // size


def tokens_of(paths: Iterable[Path], token: np.dtype, width: int) -> Iterator[np.ndarray]:
    """Yield the tokens of some files in arrays whose lengths are multiples of ``width``."""
    for path in paths:
        with path.open("rb") as file:
            while len(part := np.fromfile(file, token, max(1, AT_ONCE // width) * width)):
                yield part


def pack_tokens(parts: Iterable[np.ndarray], length: int, end: int, token: np.dtype) -> Iterator[np.ndarray]:
    """Yield ``end`` and the tokens of ``parts`` as rows ``[rows, length + 1]``; drop an incomplete last row."""
    carried = np.array([end], token)
    for part in parts:
        tokens = np.concatenate([carried, part])
        rows = (len(tokens) - 1) // length
        if rows:
            windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length][:rows]
            yield np.ascontiguousarray(windows)
        carried = tokens[rows * length :]
