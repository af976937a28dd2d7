"""Interface of a store: put, get, list and delete files by key below a base address.

Implementations: local directories (:mod:`slipstream.shared.storage.local`), S3 (:mod:`slipstream.shared.storage.s3`),
and Google Cloud Storage and Azure Blob Storage (:mod:`slipstream.shared.storage.object_store`, by a
:class:`BucketClient`). An object is read as a file by ranged requests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from slipstream.shared.errors import UserError

T = TypeVar("T")
S3 = "s3://"
GCS = "gs://"
AZURE = "abfs://"
#: Prefixes of URIs in remote stores; all other addresses are local.
STORES = (S3, GCS, AZURE)
PART_BYTES = 16 << 20
CONCURRENCY = 8
#: Number of objects per listing request.
PAGE = 1000
READ_AHEAD_BYTES = 4 << 20


@dataclass(frozen=True)
class ObjectInfo:
    """File in a store or on a local disk.

    ``etag`` changes with its content: the ETag of S3 and Azure, Google's generation, or a local file's modification
    time and size. ``modified`` is the time of writing in seconds since 1970 by the store's clock, or 0 if not
    requested.
    """

    uri: str
    size: int
    etag: str
    modified: float = field(default=0.0, compare=False)


#: Signature of :meth:`RequestStore.fetch`.
Fetch = Callable[[ObjectInfo, int, int], bytes]


class StorageUnavailable(RuntimeError):
    """Error of a store that did not answer as expected despite retries; a later attempt may succeed."""


class MissingObject(UserError):
    """Error for a key or path without a file."""


class Replaced(UserError):
    """Error for an object that was replaced while it was read."""


class AlreadyThere(Exception):
    """Error for a failed condition: the key to create exists, or the version to read was replaced."""


class Storage(Protocol):
    """Files by key (a relative POSIX path) below ``base``.

    All methods raise ``UserError`` for faults that the user can correct (permissions, no such bucket, no space) and for
    keys that could lead out of ``base`` (:mod:`slipstream.shared.storage.names`), and ``StorageUnavailable`` if the
    store does not answer.
    """

    base: str

    def scratch(self) -> Path:
        """Return a local directory in which to write files before :meth:`put`, which is cheapest from there."""

    def put(self, key: str, source: Path | bytes) -> None:
        """Store a file or bytes under ``key`` atomically; a file is moved, so ``source`` disappears."""

    def create(self, key: str, data: bytes, *, exactly_one: bool = True) -> None:
        """Store bytes atomically under a new ``key``; raise ``AlreadyThere`` if it exists.

        Of several writers exactly one succeeds; all must write different bytes. Raises ``UserError`` if the store does
        not guarantee this; ``exactly_one=False`` skips that check.
        """

    def get(self, key: str, directory: Path) -> Path:
        """Return a local path of the file: the file itself in a local store, else a download below ``directory``.

        Raises ``MissingObject``.
        """

    def list(self, prefix: str = "") -> list[str]:
        """Return all keys that start with ``prefix``, sorted."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the keys, ignoring missing ones.

        If some cannot be deleted, all others are deleted before an error is raised.
        """


def try_create(storage: Storage, key: str, data: bytes, *, exactly_one: bool = True) -> bool:
    """Call :meth:`Storage.create`; return False if the key exists."""
    try:
        storage.create(key, data, exactly_one=exactly_one)
    except AlreadyThere:
        return False
    return True


def create_next(storage: Storage, key: Callable[[int], str], data: Callable[[int], bytes], number: int) -> int:
    """Create the object with the lowest free number from ``number`` on; return that number."""
    while not try_create(storage, key(number), data(number)):
        number += 1
    return number


class RequestStore(Protocol):
    """Interface of the modules for remote stores."""

    def storage_at(self, uri: str) -> Storage: ...

    def listed(self, uri: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose addresses start with ``uri``."""

    def date(self, uri: str) -> str:
        """Return the ``Date`` header of the answer to a listing; "" without one."""

    def stat(self, uri: str) -> ObjectInfo:
        """Return size and version of an object; raises ``MissingObject``."""

    def fetch(self, source: ObjectInfo, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``; raises ``AlreadyThere`` if the object has another version now."""


def at_or_below(uri: str, candidates: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the object at ``uri`` if it exists, else the objects in ``uri`` as a directory.

    ``candidates`` are all objects whose addresses start with ``uri``.
    """
    objects = [info for info in candidates if not info.uri.endswith("/")]
    exact = [info for info in objects if info.uri == uri]
    return exact or [info for info in objects if info.uri.startswith(uri.rstrip("/") + "/")]


class ObjectStat(NamedTuple):
    """Object by its key in a bucket; ``version`` changes with every write."""

    key: str
    size: int
    version: str
    checksum: str = ""
    #: Time of writing in seconds since 1970; 0 if not requested.
    modified: float = 0.0


class RetriedRequest(Protocol):
    """Function that makes a request, retries it after transient errors, and returns the answer."""

    def __call__(self, request: Callable[[], T], /) -> T: ...


class BucketClient(Protocol):
    """Interface of a bucket or container.

    Every method but ``put_file`` is one request without retries; ``explain`` converts its exceptions to those of
    :class:`Storage`.
    """

    def page(self, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        """Return objects whose keys start with ``prefix``, and the token of the next page ("" for none)."""

    def date(self, prefix: str) -> str:
        """Return the ``Date`` header of the answer to a listing; "" without one."""

    def stat(self, key: str) -> ObjectStat: ...

    def read(self, key: str, start: int, end: int, version: str) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive) of this version."""

    def put_bytes(self, key: str, data: bytes, *, fresh: bool) -> None: ...

    def put_file(self, key: str, path: Path, ask: RetriedRequest) -> None:
        """Store a file by requests that ``ask`` makes and retries."""

    def checksum(self, path: Path) -> str:
        """Return a file's checksum in the form of :attr:`ObjectStat.checksum`; "" if chunks are checked instead."""

    def delete(self, key: str) -> None: ...

    def explain(self, uri: str, error: Exception) -> Exception:
        """Convert an error to ``StorageUnavailable`` if another try may succeed, else to the final error."""


def object_holds(stat: Callable[[str], ObjectInfo], fetch: Fetch, uri: str, data: bytes) -> bool:
    try:
        stored = stat(uri)
        return stored.size == len(data) and (not data or fetch(stored, 0, stored.size) == data)
    except (MissingObject, AlreadyThere):  # Deleted or replaced meanwhile.
        return False


def check_size(stored: ObjectInfo, sent: int) -> None:
    """Raise ``StorageUnavailable`` if the store silently lost bytes, as stores without checksums can."""
    if stored.size != sent:
        raise StorageUnavailable(f"{stored.uri}: the store holds {stored.size} bytes, but {sent} were sent")


def not_deleted(base: str, refused: int, asked: int, why: str) -> UserError:
    return UserError(f"{base}: {refused} of {asked} files were not deleted {why}")


def ranged_reader(source: ObjectInfo, fetch: Fetch) -> BinaryIO:
    """Open a seekable, buffered reader of an object; reads raise ``UserError`` if it was replaced."""
    return cast(BinaryIO, io.BufferedReader(RangedFile(source, fetch), READ_AHEAD_BYTES))


def fetch_listed(source: ObjectInfo, fetch: Fetch, start: int, end: int) -> bytes:
    """Return the bytes from ``start`` to ``end`` (exclusive) of a listed object; raises :class:`Replaced`."""
    try:
        return fetch(source, start, end)
    except AlreadyThere:
        raise Replaced(f"{source.uri}: was replaced while it was read; start again") from None


class RangedFile(io.RawIOBase):
    """Object as an unbuffered file; reads raise :class:`Replaced` if the object has changed."""

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
