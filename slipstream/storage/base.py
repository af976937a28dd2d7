"""The interface of a store: put, get, list and delete files by key, below a base.

It is implemented for local directories (:mod:`slipstream.storage.local`), for S3 (:mod:`slipstream.storage.s3`), and
for Google Cloud Storage and Azure Blob Storage (:mod:`slipstream.storage.object_store`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from slipstream.errors import UserError

S3 = "s3://"
GCS = "gs://"
AZURE = "abfs://"
#: How addresses of the stores begin that are reached by requests; all others are local.
STORES = (S3, GCS, AZURE)


@dataclass(frozen=True)
class ObjectInfo:
    """One stored file. ``etag`` changes with its content: the ETag of S3 and Azure, the generation of Google, or
    modification time and size of a local file. ``modified`` is when it was written, in seconds of the store's clock;
    0 where nobody asked."""

    uri: str
    size: int
    etag: str
    modified: float = field(default=0.0, compare=False)


class StorageUnavailable(RuntimeError):
    """The store did not answer as expected, in spite of retries. Trying again later may help."""


class MissingObject(UserError):
    """There is no file under this key."""


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

    def put(self, key: str, source: Path | bytes, *, fresh: bool = False) -> None:
        """Store a file or bytes under ``key``, whole or not at all. A file is moved: ``source`` is gone afterwards.

        ``fresh`` raises ``AlreadyThere`` if the key exists with another content, so that of several writers exactly one
        succeeds; each must write bytes of its own."""

    def get(self, key: str, directory: Path) -> Path:
        """The local path of the file: in a local store the file itself, otherwise a download below ``directory``.
        Raises ``MissingObject``."""

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with ``prefix``, sorted."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the keys; missing ones are ignored."""


class RequestStore(Protocol):
    """What a module for a store that is reached by requests has; :mod:`slipstream.storage.open` says what each does."""

    def storage_at(self, uri: str) -> Storage: ...

    def list_below(self, uri: str) -> list[ObjectInfo]: ...

    def stat(self, uri: str) -> ObjectInfo:
        """The object as it is now. Raises ``MissingObject``."""

    def open_version(self, source: ObjectInfo) -> BinaryIO: ...

    def read_range(self, source: ObjectInfo, start: int, end: int) -> bytes: ...


def at_or_below(uri: str, found: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Of the objects whose addresses begin with ``uri``: the one at it, or else those in it as a directory."""
    objects = [info for info in found if not info.uri.endswith("/")]
    exact = [info for info in objects if info.uri == uri]
    return exact or [info for info in objects if info.uri.startswith(uri.rstrip("/") + "/")]
