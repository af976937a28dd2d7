"""What an engine needs of a store: put, get, list and delete by key under a base.

Implemented for local directories and for S3, and nothing here knows either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.errors import UserError

S3 = "s3://"


@dataclass(frozen=True)
class ObjectInfo:
    """One stored file. ``etag`` changes when the file does: S3's own, or modification time and size of a local file."""

    uri: str
    size: int
    etag: str


class StorageUnavailable(RuntimeError):
    """The store did not answer, or not sensibly, for as long as we were patient. Trying again later may help."""


class MissingObject(UserError):
    """There is nothing under this key."""


class AlreadyThere(Exception):
    """A key that was to be written afresh exists: somebody else was first."""


class Storage(Protocol):
    """Files by key (a relative POSIX path) under ``base``.

    All raise ``UserError`` for what the user has to mend (permissions, no such bucket, no space) and
    ``StorageUnavailable`` when the store stayed away.
    """

    base: str

    def scratch(self) -> Path:
        """A directory of this machine in which to write what is then put; put is cheapest from there."""

    def put(self, key: str, source: Path | bytes, *, fresh: bool = False) -> None:
        """Store a file or bytes under ``key``, whole or not at all. A file is moved: ``source`` is gone afterwards.

        ``fresh`` raises ``AlreadyThere`` if the key exists with another content, so that of several writers exactly one
        succeeds; each must write bytes of its own."""

    def get(self, key: str, directory: Path) -> Path:
        """Where the file lies on this machine: as it is for a local store, else downloaded into ``directory`` under
        its key. Raises ``MissingObject``."""

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with ``prefix``, sorted."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys; those that are not there are no error."""
