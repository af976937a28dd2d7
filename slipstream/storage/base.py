"""The interface of a store: put, get, list and delete files by key, below a base.

It is implemented for local directories (:mod:`slipstream.storage.local`), for S3 (:mod:`slipstream.storage.s3`), and
for Google Cloud Storage and Azure Blob Storage (:mod:`slipstream.storage.object_store`), of which it needs a
:class:`Bucket`. An object is read as a file by ranged requests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from slipstream.errors import UserError

T = TypeVar("T")
S3 = "s3://"
GCS = "gs://"
AZURE = "abfs://"
#: How addresses of the stores begin that are reached by requests; all others are local.
STORES = (S3, GCS, AZURE)
PART_BYTES = 16 << 20
CONCURRENCY = 8
#: Objects that are listed by one request.
PAGE = 1000
READ_AHEAD_BYTES = 4 << 20


@dataclass(frozen=True)
class ObjectInfo:
    """One stored file. ``etag`` changes with its content: the ETag of S3 and Azure, the generation of Google, or
    modification time and size of a local file. ``modified`` is when it was written, in seconds of the store's clock;
    0 where nobody asked."""

    uri: str
    size: int
    etag: str
    modified: float = field(default=0.0, compare=False)


#: :meth:`RequestStore.fetch`.
Fetch = Callable[[ObjectInfo, int, int], bytes]


class StorageUnavailable(RuntimeError):
    """The store did not answer as expected, in spite of retries. Trying again later may help."""


class MissingObject(UserError):
    """There is no file under this key."""


class Replaced(UserError):
    """The object was written anew while it was read."""


class AlreadyThere(Exception):
    """The key exists already, because another writer was first."""


class Storage(Protocol):
    """Files by key (a relative POSIX path) under ``base``.

    All methods raise ``UserError`` for what the user can correct (permissions, no such bucket, no space), for keys that
    could lead out of ``base`` (:mod:`slipstream.storage.names`), given or listed, and ``StorageUnavailable`` if the
    store does not answer.
    """

    base: str

    def scratch(self) -> Path:
        """A local directory for files that will be put; putting a file from there is cheapest."""

    def put(self, key: str, source: Path | bytes) -> None:
        """Store a file or bytes under ``key``, whole or not at all. A file is moved: ``source`` is gone afterwards."""

    def create(self, key: str, data: bytes, *, exactly_one: bool = True) -> None:
        """Store bytes under a ``key`` that does not exist, whole or not at all.

        Raises ``AlreadyThere`` if it does, so that of several writers exactly one succeeds; each must write bytes of
        its own. Raises ``UserError`` if the store does not keep to that. Work that can do without passes
        ``exactly_one=False``: then this is not checked.
        """

    def get(self, key: str, directory: Path) -> Path:
        """The local path of the file: in a local store the file itself, otherwise a download below ``directory``.
        Raises ``MissingObject``."""

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with ``prefix``, sorted."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the keys; missing ones are ignored. If some cannot be deleted, all others are, before it raises."""


class RequestStore(Protocol):
    """What a module for a store that is reached by requests has."""

    def storage_at(self, uri: str) -> Storage: ...

    def listed(self, uri: str) -> Iterator[ObjectInfo]:
        """All objects whose addresses begin with ``uri``."""

    def date(self, uri: str) -> str:
        """Return the ``Date`` header of the answer to a listing; "" without one."""

    def stat(self, uri: str) -> ObjectInfo:
        """The object as it is now. Raises ``MissingObject``."""

    def fetch(self, source: ObjectInfo, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``. Raises ``AlreadyThere`` if the version is another."""


def at_or_below(uri: str, candidates: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Of the objects whose addresses begin with ``uri``: the one at it, or else those in it as a directory."""
    objects = [info for info in candidates if not info.uri.endswith("/")]
    exact = [info for info in objects if info.uri == uri]
    return exact or [info for info in objects if info.uri.startswith(uri.rstrip("/") + "/")]


class ObjectStat(NamedTuple):
    """An object in its bucket. ``version`` changes whenever it is written."""

    key: str
    size: int
    version: str
    checksum: str = ""
    #: When it was written, in seconds; 0 where nobody asked.
    modified: float = 0.0


class Ask(Protocol):
    """Makes a request and returns its answer, tried again as long as that may help."""

    def __call__(self, request: Callable[[], T], /) -> T: ...


class Bucket(Protocol):
    """A bucket, or a container. Every method but ``put_file`` is one request, which is not retried; what it raises is
    turned by ``explain`` into what :class:`slipstream.storage.base.Storage` promises."""

    def page(self, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        """Objects whose keys begin with ``prefix``, and the token of the next page ("" for none)."""

    def date(self, prefix: str) -> str:
        """Return the ``Date`` header of the answer to a listing; "" without one."""

    def stat(self, key: str) -> ObjectStat: ...

    def read(self, key: str, start: int, end: int, version: str) -> bytes:
        """The bytes from ``start`` to ``end`` of this version."""

    def put_bytes(self, key: str, data: bytes, *, fresh: bool) -> None: ...

    def put_file(self, key: str, path: Path, ask: Ask) -> None:
        """Store a file by requests that ``ask`` makes and retries."""

    def checksum(self, path: Path) -> str:
        """What ``stat`` finds as ``checksum`` if these are its bytes: "" where each piece of a download is checked."""

    def delete(self, key: str) -> None: ...

    def explain(self, uri: str, error: Exception) -> Exception:
        """``StorageUnavailable`` for an error after which another attempt may succeed, else what to raise."""


def holds(stat: Callable[[str], ObjectInfo], fetch: Fetch, uri: str, data: bytes) -> bool:
    """Return True if the object at ``uri`` has exactly the bytes ``data``."""
    try:
        stored = stat(uri)
        return stored.size == len(data) and (not data or fetch(stored, 0, stored.size) == data)
    except (MissingObject, AlreadyThere):  # deleted or replaced meanwhile
        return False


def check_size(stored: ObjectInfo, sent: int) -> None:
    """Raise ``StorageUnavailable`` if the store lost bytes and did not notice, as one without checksums may."""
    if stored.size != sent:
        raise StorageUnavailable(f"{stored.uri}: the store holds {stored.size} bytes, {sent} were sent")


def not_deleted(base: str, refused: int, asked: int, why: str) -> UserError:
    """The error of a deletion that was refused for some of the files."""
    return UserError(f"{base}: {refused} of {asked} files were not deleted {why}")


def ranged_reader(source: ObjectInfo, fetch: Fetch) -> BinaryIO:
    """A seekable reader that reads ahead. Reads raise ``UserError`` if the object was replaced."""
    return cast(BinaryIO, io.BufferedReader(RangedFile(source, fetch), READ_AHEAD_BYTES))


def fetch_listed(source: ObjectInfo, fetch: Fetch, start: int, end: int) -> bytes:
    """The bytes from ``start`` to ``end`` of a listed object. Raises :class:`Replaced` if it was since."""
    try:
        return fetch(source, start, end)
    except AlreadyThere:
        raise Replaced(f"{source.uri}: was replaced while it was read; start again") from None


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
