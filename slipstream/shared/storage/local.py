"""Store in a local directory: files are written, synced, and renamed into place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from filelock import FileLock

from slipstream.shared.errors import UserError
from slipstream.shared.storage.base import STORES, AlreadyThere, MissingObject, ObjectInfo, not_deleted
from slipstream.shared.storage.names import check_keys, check_prefix, path_below

SCRATCH = ".scratch"
#: Error codes of a full disk or quota.
FULL = (errno.ENOSPC, errno.EDQUOT)
#: Error codes of disks without hard links (exFAT, SMB, some FUSE file systems).
NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


def local_path(uri: str) -> Path:
    """Return a local address as a path, with ``~`` expanded. Raises ``UserError`` for an unknown scheme."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(with_home(uri))
    if scheme == "file":
        return Path(rest)
    raise UserError(f"{uri}: {scheme}:// is not supported; expected a path, file://, s3://, gs:// or abfs://")


def with_home(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - leaves the ~ of an unknown user


def lasting_address(uri: str) -> str:
    """Return an address that does not depend on the working directory: absolute, unless it is in a store or empty."""
    return uri if not uri or uri.startswith(STORES) else str(local_path(uri).absolute())


def local_info(path: Path) -> ObjectInfo:
    return info_of(str(path), path.stat())


def info_of(uri: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(uri, status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}", status.st_mtime)


def list_files(path: Path) -> list[ObjectInfo]:
    """Return the file, or all files below the directory, sorted by path.

    Scratch files and files that are deleted meanwhile are skipped.
    """
    if path.is_file():
        return [local_info(path)]
    found = []
    for parent, directories, files in os.walk(path, onerror=raise_unless_absent):
        if SCRATCH in directories:
            directories.remove(SCRATCH)
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                found.append(local_info(Path(parent, file)))
    return sorted(found, key=lambda info: info.uri)


class LocalStorage:
    """Files below a directory that all ranks can access; every file appears complete and synced, by a rename."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = str(directory)

    def scratch(self) -> Path:
        # On the same disk, so that put is a rename; :meth:`list` skips it.
        path = self.directory / SCRATCH
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        return path

    def put(self, key: str, source: Path | bytes) -> None:
        target = path_below(self.directory, key)
        with self._written(source) if isinstance(source, bytes) else self._synced(source) as file:
            self._place(file, target, Path.replace)

    def create(self, key: str, data: bytes, *, exactly_one: bool = True) -> None:
        # A disk that supports neither of the two ways refuses.
        target = path_below(self.directory, key)
        with self._written(data) as file:
            self._place(file, target, self._rename_to_new)

    @contextlib.contextmanager
    def _written(self, data: bytes) -> Iterator[Path]:
        """Yield a synced scratch file with these bytes; remove it unless it was moved."""
        path = self.scratch() / uuid.uuid4().hex
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _synced(self, path: Path) -> Iterator[Path]:
        try:
            sync_to_disk(path)
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        yield path

    def _place(self, file: Path, target: Path, move: Callable[[Path, Path], object]) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            move(file, target)
            sync_to_disk(target.parent)
        except OSError as error:
            raise cannot_write(self.directory, error) from None

    def _rename_to_new(self, file: Path, target: Path) -> None:
        """Move the file to a new name, or raise ``AlreadyThere`` if the name exists."""
        try:
            # A hard link, unlike a rename, fails if the name exists: exactly one of several writers wins.
            os.link(file, target)
        except FileExistsError:
            raise AlreadyThere(str(target)) from None
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            # Others would see an exclusively created file while it is empty.
            with self._alone():
                if target.exists():
                    raise AlreadyThere(str(target)) from None
                file.rename(target)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock, so that one writer at a time creates a file on a disk without hard links."""
        try:
            lock = file_lock(self.scratch() / "create.lock")
            lock.acquire()
        except OSError:
            raise UserError(
                f"{self.directory}: this disk has neither hard links nor locks, so two runs could write to the same "
                "place; choose a directory on another disk, or a store"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def get(self, key: str, directory: Path) -> Path:
        path = path_below(self.directory, key)
        if not path.is_file():
            raise MissingObject(f"{path}: no such file")
        return path

    def list(self, prefix: str = "") -> list[str]:
        # Only the prefix's directory is walked. Files that are deleted meanwhile are skipped.
        keys = []
        top = self.directory / check_prefix(prefix, self.base).rpartition("/")[0]
        for parent, directories, files in os.walk(top, onerror=raise_unless_absent):
            if SCRATCH in directories:
                directories.remove(SCRATCH)
            where = Path(parent).relative_to(self.directory)
            keys += [(where / file).as_posix() for file in files]
        return check_keys((key for key in keys if key.startswith(prefix)), self.base)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [path_below(self.directory, key) for key in keys]
        refused: list[OSError] = []
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                refused.append(error)
            with contextlib.suppress(OSError):  # Fails at the first directory that is not empty.
                for parent in path.parents[: path.parents.index(self.directory)]:
                    parent.rmdir()
        if refused:
            raise not_deleted(self.base, len(refused), len(paths), f"({refused[0].strerror}); check the permissions")


def out_of_space(error: Exception) -> bool:
    """Return True if a disk or quota is full.

    Libraries (Rust, ONNX Runtime) and writers of many files report this only in the message.
    """
    return getattr(error, "errno", None) in FULL or any(os.strerror(code) in str(error) for code in FULL)


def disk_time(directory: Path) -> float:
    """Return the time in seconds since 1970 by the disk's clock, which may be another machine's.

    For a read-only directory, it is this machine's time.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk that holds, or will hold, the directory."""
    return shutil.disk_usage(nearest_existing(directory)).free


def fullest(directories: Iterable[Path]) -> Path:
    """Return the first directory on the disk with the least free space."""
    by_disk: dict[int, Path] = {}
    for directory in directories:
        by_disk.setdefault(disk_of(directory), directory)
    return min(by_disk.values(), key=free_bytes)


def disk_of(directory: Path) -> int:
    return nearest_existing(directory).stat().st_dev


def nearest_existing(directory: Path) -> Path:
    return next(path for path in (directory, *directory.absolute().parents) if path.exists())


def cannot_write(directory: Path, error: Exception) -> UserError:
    """Return the ``UserError`` for an error on writing below ``directory``."""
    if out_of_space(error):
        free = free_bytes(directory) >> 20
        return UserError(f"{directory}: no space left ({free} MiB free); make room or choose another place")
    why = getattr(error, "strerror", None) or error
    return UserError(f"{directory}: cannot be written ({why}); check the path and its permissions")


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Convert an ``OSError`` in the block to the error of :func:`cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(directory, error) from None


def raise_unless_absent(error: OSError) -> None:
    """Raise ``UserError`` unless the directory is missing, so that an unreadable directory is not taken as empty."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise UserError(f"{error.filename}: cannot be listed ({error.strerror}); check the disk and its permissions")


def sync_to_disk(path: Path) -> None:
    """Flush a file's bytes, or a directory's entries, to disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_lock(path: Path, *, thread_local: bool = True) -> FileLock:
    """Return a lock; if it is ``thread_local``, only the acquiring thread can release it.

    ``acquire`` raises ``OSError`` on a disk without locks. filelock's own fallback is disabled: it relies on process
    ids, which are not unique across containers.
    """
    return FileLock(path, thread_local=thread_local, fallback_to_soft=False)
