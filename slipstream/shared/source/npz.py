"""Arrays of untrusted ``.npz`` files, whose headers are checked before their content takes memory."""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

import numpy as np

#: Errors of all functions here for a damaged file.
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OverflowError, RuntimeError, ValueError)
#: Compression methods of NumPy. Others of zip may need gigabytes to unpack a byte.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class ArrayHeader(NamedTuple):
    """Header of a ``.npy`` stream; ``columnwise`` is True for Fortran order."""

    shape: tuple[int, ...]
    columnwise: bool
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@contextmanager
def open_member(file: IO[bytes], name: str, methods: Sequence[int] = METHODS) -> Iterator[IO[bytes]]:
    """Open the array ``name`` as a stream of ``.npy`` bytes."""
    with zipfile.ZipFile(file) as archive:
        info = next((each for each in archive.infolist() if each.filename == f"{name}.npy"), None)
        if info is None:
            raise ValueError(f"holds no array {name!r}")
        if info.compress_type not in methods:
            raise ValueError(f"{name!r} is compressed by method {info.compress_type}")
        if info.compress_size > file.seek(0, os.SEEK_END):
            raise ValueError(f"{name!r} ends too early")
        with archive.open(info) as stream:
            yield stream


def read_header(stream: IO[bytes]) -> ArrayHeader:
    """Read the header of a ``.npy`` stream."""
    # NumPy writes 1.0 unless a header has more than 64 KiB. Those of other versions may declare gigabytes.
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"version {version} of the .npy format; expected (1, 0)")
    try:
        return ArrayHeader(*np.lib.format.read_array_header_1_0(stream))
    except (MemoryError, RecursionError, tokenize.TokenError):  # a header is parsed as Python
        raise ValueError("a header that cannot be parsed") from None


def read_content(stream: IO[bytes], header: ArrayHeader) -> np.ndarray:
    """Return the array after ``header``."""
    values = np.frombuffer(stream.read(header.bytes), header.dtype)
    return values.reshape(header.shape, order="F" if header.columnwise else "C")
