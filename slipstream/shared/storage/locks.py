"""File locks that the system releases whenever their process ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock


def file_lock(path: Path, *, thread_local: bool = True) -> FileLock:
    """Return a lock; if it is ``thread_local``, only the acquiring thread can release it.

    ``acquire`` raises ``OSError`` on a disk without locks. filelock's own fallback is disabled: it relies on process
    ids, which are not unique across containers.
    """
    return FileLock(path, thread_local=thread_local, fallback_to_soft=False)
