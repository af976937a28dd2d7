"""An object of a store as a file: every read is one ranged request."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from slipstream.errors import UserError
from slipstream.storage.base import AlreadyThere, ObjectInfo

READ_AHEAD_BYTES = 4 << 20

#: Return the bytes from ``start`` to ``end``. Raises ``AlreadyThere`` if the object is not the one that was listed.
Fetch = Callable[[int, int], bytes]


def ranged_reader(source: ObjectInfo, fetch: Fetch) -> BinaryIO:
    """A seekable reader that reads ahead. Reads raise ``UserError`` if the object was replaced."""
    return cast(BinaryIO, io.BufferedReader(RangedFile(source, fetch), READ_AHEAD_BYTES))


def fetch_listed(source: ObjectInfo, fetch: Fetch, start: int, end: int) -> bytes:
    """The bytes from ``start`` to ``end`` of a listed object. Raises ``UserError`` if it was replaced since."""
    try:
        return fetch(start, end)
    except AlreadyThere:
        raise UserError(f"{source.uri}: was replaced while it was read; start again") from None


class RangedFile(io.RawIOBase):
    """An object as a file, on the condition that it has not changed."""

    def __init__(self, source: ObjectInfo, fetch: Fetch) -> None:
        self._source = source
        self._fetch = fetch
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        if start + offset < 0:
            raise ValueError(f"{self._source.uri}: cannot seek before the beginning")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._source.size)
        if end <= self._position:
            return 0
        data = fetch_listed(self._source, self._fetch, self._position, end)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        # The inherited method reads 8 KiB at a time.
        data = bytearray(max(0, self._source.size - self._position))
        self.readinto(data)
        return bytes(data)
