"""File locks that the system releases however their process ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock


def lock_of(path: Path, *, thread_local: bool = True) -> FileLock:
    """Return a lock, which another thread may release unless it is ``thread_local``.

    ``acquire`` raises ``OSError`` on a disk without locks: filelock's substitute uses process ids, which every
    container counts for itself.
    """
    return FileLock(path, thread_local=thread_local, fallback_to_soft=False)
