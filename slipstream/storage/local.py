"""A store in a local directory: files are written, synced, and renamed into place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from slipstream.errors import UserError
from slipstream.storage.base import AlreadyThere, MissingObject, ObjectInfo
from slipstream.storage.names import check_keys, check_prefix, path_below

SCRATCH = ".scratch"


def local_path(uri: str) -> Path:
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme == "file":
        return Path(rest)
    raise UserError(f"{uri}: {scheme}:// is not supported; expected a path, file://, s3://, gs:// or abfs://")


def local_info(path: Path) -> ObjectInfo:
    status = path.stat()
    return ObjectInfo(str(path), status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}", status.st_mtime)


class LocalStorage:
    """Files below a directory that all ranks can access; each appears complete and synced, by a rename."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = str(directory)

    def scratch(self) -> Path:
        # On the same disk, so that put is a rename; :meth:`list` leaves it out.
        path = self.directory / SCRATCH
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        return path

    def put(self, key: str, source: Path | bytes, *, fresh: bool = False) -> None:
        target = path_below(self.directory, key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                data, source = source, self.scratch() / uuid.uuid4().hex
                with source.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
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

    def get(self, key: str, directory: Path) -> Path:
        path = path_below(self.directory, key)
        if not path.is_file():
            raise MissingObject(f"{path}: no such file")
        return path

    def list(self, prefix: str = "") -> list[str]:
        # Only the prefix's directory is walked. Files that others delete meanwhile are left out.
        keys = []
        for parent, directories, files in os.walk(self.directory / check_prefix(prefix, self.base).rpartition("/")[0]):
            if SCRATCH in directories:
                directories.remove(SCRATCH)
            where = Path(parent).relative_to(self.directory)
            keys += [(where / file).as_posix() for file in files]
        return check_keys((key for key in keys if key.startswith(prefix)), self.base)

    def delete(self, keys: Iterable[str]) -> None:
        for path in [path_below(self.directory, key) for key in keys]:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # of the first directory that is not empty
                for parent in path.parents[: path.parents.index(self.directory)]:
                    parent.rmdir()


def cannot_write(directory: Path, error: OSError) -> UserError:
    """The user error for an operating system's error on writing below ``directory``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        # The directory may not exist yet.
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free >> 20
        return UserError(f"{directory}: no space left ({free} MiB free); make room or choose another place")
    return UserError(f"{directory}: cannot be written ({error.strerror}); check the path and its permissions")


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory survive a power failure, as fsync does for a file's bytes."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
