"""The handwritten digits that ship with scikit-learn: 1,797 real scans of 8 x 8 pixels, the default data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from slipstream.errors import UserError
from slipstream.prepare.columns.hashing import hash_rows
from slipstream.prepare.source.images.sets import Chunk, ImageSet

TARGET = "digit"


def load() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (uint8 ``[1797, 1, 8, 8]``, 0 to 16) and labels (int32 ``[1797]``, 0 to 9).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, CC BY 4.0.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int32)


@dataclass(frozen=True)
class Digits:
    """All of them, as one part."""

    rows: int

    def chunks(self) -> Iterator[Chunk]:
        pixels, labels = load()
        # Hashed pixel by pixel, as they have been from the beginning, so that their splits stay what they are.
        flat = pixels.reshape(len(pixels), -1)
        columns = [(str(place), pa.array(flat[:, place])) for place in range(flat.shape[1])]
        yield Chunk(pixels, labels, hash_rows(columns, len(flat)), np.ones(len(pixels), bool))


def open_digits(target: str) -> ImageSet:
    """The digits as a set of images. Raises ``UserError`` for a ``target`` of other data."""
    if target not in ("", TARGET):
        raise UserError(f"target: {target!r} needs --data; without it the digits are taken, whose target is {TARGET!r}")
    pixels, _ = load()
    classes = tuple(str(digit) for digit in range(10))
    return ImageSet("handwritten digits (scikit-learn)", TARGET, classes, pixels.shape[1:], [Digits(len(pixels))])
