"""Storage: the same few operations on a local directory and on an S3 prefix.

What an engine needs of a store is small: put, get, list and delete by key under a base, and a seekable reader for
ranges of large files. Nothing here knows Flyte; S3 itself is in :mod:`tasks.s3`, loaded for an ``s3://`` URI only.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from tasks.errors import UserError

S3 = "s3://"
SCRATCH = ".scratch"


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

    def put(self, key: str, source: Path | bytes, *, fresh: bool = False) -> ObjectInfo:
        """Store a file or bytes under ``key``, whole or not at all, and confirm size and checksum. A file is *taken*:
        it is gone from ``source`` afterwards. With ``fresh`` (for bytes that are this writer's alone) a key that exists
        with another content raises ``AlreadyThere``: of several writers exactly one wins."""

    def get(self, key: str, directory: Path) -> Path:
        """Where the file lies on this machine: as it is for a local store, else downloaded into ``directory`` under
        its key. Raises ``MissingObject``."""

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with ``prefix``, sorted."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys; those that are not there are no error."""


def storage_for(uri: str) -> Storage:
    """The store behind a directory's path, a ``file://`` or an ``s3://`` URI. Raises ``UserError`` for others."""
    if uri.startswith(S3):
        from tasks.s3 import S3Storage

        return S3Storage(uri)
    return LocalStorage(local_path(uri))


def list_objects(uri: str) -> list[ObjectInfo]:
    """The files behind ``uri`` (one file, all below a directory, all that begin with an S3 prefix), sorted by URI.

    An S3 key that exists as such is one file; otherwise it is taken for a directory, and what merely begins with the
    same letters is not in it. Raises ``UserError``; an empty list means that nothing is there.
    """
    if uri.startswith(S3):
        from tasks.s3 import list_s3

        return list_s3(uri)
    path = local_path(uri)
    paths = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return sorted((local_info(found) for found in paths), key=lambda info: info.uri)


def open_reader(uri: str) -> BinaryIO:
    """A seekable, buffered reader: a file, or ranged requests to S3, each repeated when it fails on the way."""
    if uri.startswith(S3):
        from tasks.s3 import open_s3

        return open_s3(uri)
    path = local_path(uri)
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise MissingObject(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def copy_within_s3(source: str, target: str) -> None:
    """Copy a file within S3: its bytes do not pass through this machine."""
    from tasks.s3 import copy_object

    copy_object(source, target)


def local_path(uri: str) -> Path:
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme == "file":
        return Path(rest)
    raise UserError(f"{uri}: {scheme}:// is not supported; expected a path, file:// or s3://bucket/key")


def local_info(path: Path) -> ObjectInfo:
    status = path.stat()
    return ObjectInfo(str(path), status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}")


class LocalStorage:
    """Files under a directory of a disk that all ranks see. Files appear by a rename, whole, and are synced."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = str(directory)

    def scratch(self) -> Path:
        # On the same disk, so that put is a rename; outside every key, so that it is never taken for one.
        path = self.directory / SCRATCH
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        return path

    def put(self, key: str, source: Path | bytes, *, fresh: bool = False) -> ObjectInfo:
        target = self.directory / key
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                source = write_synced(self.scratch() / uuid.uuid4().hex, source)
            if fresh:
                # A hard link, unlike a rename, fails if the name exists: of several writers exactly one wins.
                os.link(source, target)
                source.unlink()
            else:
                source.replace(target)
            sync_directory(target.parent)
        except FileExistsError:
            raise AlreadyThere(str(target)) from None
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        return local_info(target)

    def get(self, key: str, directory: Path) -> Path:
        path = self.directory / key
        if not path.is_file():
            raise MissingObject(f"{path}: no such file")
        return path

    def list(self, prefix: str = "") -> list[str]:
        # Only the directory that the prefix names has to be walked. What others remove meanwhile is passed over.
        found = []
        for parent, directories, files in os.walk(self.directory / prefix.rpartition("/")[0]):
            if SCRATCH in directories:
                directories.remove(SCRATCH)
            where = Path(parent).relative_to(self.directory)
            found += [(where / file).as_posix() for file in files]
        return sorted(key for key in found if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.directory / key
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self.directory or not remove_if_empty(parent):
                    break


def cannot_write(directory: Path, error: OSError) -> UserError:
    """What an error of the operating system means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        # The directory may not exist yet: ask the nearest one that does.
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free >> 20
        return UserError(f"{directory}: no space left ({free} MiB free); make room or choose another place")
    return UserError(f"{directory}: cannot be written ({error.strerror}); check the path and its permissions")


def write_synced(path: Path, data: bytes) -> Path:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power cut, as fsync does for a file's bytes."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        return False
    return True
