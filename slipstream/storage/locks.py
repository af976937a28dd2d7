"""Locks on files, which the system releases when their process ends, however that happens."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock


def lock_of(path: Path, *, thread_local: bool = True) -> FileLock:
    """A lock, which another thread may release unless it is ``thread_local``.

    ``acquire`` raises ``OSError`` on a disk that has no locks: filelock's substitute goes by the numbers of processes,
    which each container counts for itself.
    """
    return FileLock(path, thread_local=thread_local, fallback_to_soft=False)
