"""Workspaces: hidden directories for unfinished work, removed by other processes once their owner is gone.

The owner locks a file next to the directory; the system releases the lock whenever the process ends. Process ids would
not do: containers that share the disk have their own. The lock precedes the directory, so a directory in use is never
unlocked.

Not every disk shows a lock to all machines that share it (NFS mounted with local locks, a directory of a virtual
machine's host). So another running system's workspaces are removed only when they are old. Without locks, abandoned
workspaces cannot be distinguished from those in use, and none is removed.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from slipstream.errors import UserError
from slipstream.storage import disk_time
from slipstream.storage.locks import lock_of

#: Suffixes of a workspace and its lock, which share the rest of the name.
WORK, LOCK = ".work", ".lock"
#: Seconds after which another system's workspace counts as abandoned.
FORSAKEN_S = 7 * 86_400
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """Yield a fresh directory in ``parent``, on the same disk; remove it afterwards unless it was renamed.

    Workspaces of killed processes are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    directory = parent / f".{secrets.token_hex(8)}{WORK}"
    with owned(directory):
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
def owned(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory that does not exist yet, if the disk has locks."""
    path = directory.with_suffix(LOCK)
    lock = lock_of(path)
    try:
        with suppress(OSError):
            lock.acquire()
            path.write_text(running_system(), encoding="ascii")
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked
        lock.release()


def sweep(parent: Path) -> None:
    """Remove the workspaces in ``parent`` whose owners are gone."""
    for path in parent.glob(f".{'[0-9a-f]' * 16}{LOCK}"):
        lock, directory = lock_of(path), path.with_suffix(WORK)
        with suppress(Timeout, OSError):
            lock.acquire(blocking=False)
            try:
                if not directory.exists() or is_forsaken(path):
                    shutil.rmtree(directory, ignore_errors=True)
                    path.unlink(missing_ok=True)
            finally:
                lock.release()


def is_forsaken(lock: Path) -> bool:
    """Return True if a lock that is free here is free everywhere.

    Its age is by the disk's clock: a machine with a wrong clock must not remove another machine's workspace.
    """
    if lock.read_text(encoding="ascii") == running_system():
        return True
    return disk_time(lock.parent) - lock.stat().st_mtime > FORSAKEN_S


def running_system() -> str:
    """Return an id that only the containers of this running system share; "" if there is none."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""
