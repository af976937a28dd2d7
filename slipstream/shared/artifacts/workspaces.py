"""Workspaces: hidden directories for unfinished work, removed by other processes when their owner has died.

The owner locks a file next to the directory; the system releases the lock when the process ends. Process ids would not
do, since containers that share a disk have separate ids. The lock is taken before the directory is created, so a
workspace in use is always locked.

Not every disk shares locks between machines (NFS with local locks, a directory of a virtual machine's host). So
workspaces of another running system are removed only after :data:`FORSAKEN_S`. On a disk without locks none is removed.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from slipstream.shared.errors import UserError
from slipstream.shared.storage import disk_time
from slipstream.shared.storage.local import file_lock

#: Suffixes of a workspace and of its lock file; the names are otherwise equal.
WORK, LOCK = ".work", ".lock"
#: Age in seconds at which an unlocked workspace of another system is removed.
FORSAKEN_S = 7 * 86_400
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def temporary_workspace(parent: Path) -> Iterator[Path]:
    """Yield a new directory in ``parent``; remove it afterwards unless it was renamed.

    Workspaces of killed processes are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_orphaned_workspaces(parent)
    directory = parent / f".{secrets.token_hex(8)}{WORK}"
    with hold_workspace_lock(directory):
        try:
            directory.mkdir()
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def put_in_place(directory: Path, target: Path) -> None:
    """Rename a finished directory to ``target`` on the same disk.

    Raises ``UserError`` if another process has created ``target`` meanwhile.
    """
    try:
        directory.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise UserError(
            f"{target}: another process has just created it; expected a directory that does not exist"
        ) from None


@contextmanager
def hold_workspace_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a workspace before ``directory`` is created; do nothing on a disk without locks."""
    path = directory.with_suffix(LOCK)
    lock = file_lock(path)
    try:
        with suppress(OSError):
            lock.acquire()
            path.write_text(running_system(), encoding="ascii")
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked
        lock.release()


def remove_orphaned_workspaces(parent: Path) -> None:
    """Remove the workspaces in ``parent`` whose owners have died."""
    for path in parent.glob(f".{'[0-9a-f]' * 16}{LOCK}"):
        lock, directory = file_lock(path), path.with_suffix(WORK)
        with suppress(Timeout, OSError):
            lock.acquire(blocking=False)
            try:
                if not directory.exists() or is_forsaken(path):
                    shutil.rmtree(directory, ignore_errors=True)
                    path.unlink(missing_ok=True)
            finally:
                lock.release()


def is_forsaken(lock: Path) -> bool:
    """Return True if an unlocked workspace can be removed: it is this system's, or older than ``FORSAKEN_S``.

    The age is taken from the disk's clock, since this machine's clock may be wrong.
    """
    if lock.read_text(encoding="ascii") == running_system():
        return True
    return disk_time(lock.parent) - lock.stat().st_mtime > FORSAKEN_S


def running_system() -> str:
    """Return the kernel's boot id, which all containers on this machine share; "" if there is none."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""
