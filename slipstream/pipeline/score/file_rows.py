"""Batches of images and texts, and their quarantined rows.

A file has one row, or several (arrays).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.shared.errors import UserError
from slipstream.shared.source.documents import BLOCK_FILES, read_text
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.images import (
    ArrayPart,
    DigitsPart,
    FolderPart,
    Part,
    Shape,
    open_array,
    rows_at_once,
    shape_text,
)
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.resolved import ResolvedSource

#: Name of scikit-learn's digits as a source.
DIGITS = "digits"


@dataclass(frozen=True)
class FileBatch:
    """Scorable rows, with every row's file and number in the file (from 1).

    ``content`` is uint8 ``[rows, channels, height, width]``, or texts. ``bad`` are quarantined rows; ``read`` counts
    all.
    """

    read: int
    files: list[str]
    numbers: list[int]
    content: np.ndarray | list[str]
    bad: list[BadRow]


def read_texts(files: Sequence[SourceFile], source: ResolvedSource) -> Iterator[FileBatch]:
    for start in range(0, len(files), BLOCK_FILES):
        block = files[start : start + BLOCK_FILES]
        texts = [read_text(file, source.config.encoding) for file in block]
        good = [(file.uri, text) for file, text in zip(block, texts, strict=True) if isinstance(text, str)]
        bad = [text for text in texts if isinstance(text, BadRow)]
        yield FileBatch(len(block), [uri for uri, _ in good], [1] * len(good), [text for _, text in good], bad)


def read_images(files: Sequence[SourceFile], source: ResolvedSource, shape: Shape) -> Iterator[FileBatch]:
    """Yield batches of images.

    Raises ``UserError`` for images whose shape is not the model's.
    """
    if source.format == "images":
        step = rows_at_once(shape)
        for start in range(0, len(files), step):
            block = tuple(files[start : start + step])
            yield from of_folder(FolderPart(block, (0,) * len(block), shape, source.config, "the model takes"))
        return
    arrays = [(array_part(file, shape), file.uri) for file in files] if source.format == "arrays" else []
    for part, name in arrays or [(DigitsPart(0), DIGITS)]:
        done = 0
        for chunk in part.chunks():
            rows = len(chunk.pixels)
            check_shape(name, chunk.pixels.shape[1:], shape)
            yield FileBatch(rows, [name] * rows, list(range(done + 1, done + rows + 1)), chunk.pixels, [])
            done += rows


def of_folder(part: FolderPart) -> Iterator[FileBatch]:
    for chunk in part.chunks():
        good = np.flatnonzero(chunk.good).tolist()
        yield FileBatch(
            part.rows, [part.files[row].uri for row in good], [1] * len(good), chunk.pixels[chunk.good], chunk.bad
        )


def array_part(file: SourceFile, shape: Shape) -> Part:
    array = open_array(file, "")
    check_shape(file.uri, array.shape, shape)
    return ArrayPart(file, array.images, np.zeros(len(array.labels), np.int32), array.channels_last)


def check_shape(name: str, found: tuple[int, ...], shape: Shape) -> None:
    if tuple(found) != tuple(shape):
        given = shape_text((found[0], found[1], found[2]))
        raise UserError(f"{name}: its images are {given}, and the model takes {shape_text(shape)}")
