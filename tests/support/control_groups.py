"""Control groups: made-up files, and real groups with little memory, like a container's."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HIERARCHY = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a control group with a memory limit in bytes, version 1 or 2; ``put`` moves a process into it.

    Skips the test if none can be made.
    """
    version_2 = (HIERARCHY / "cgroup.controllers").exists()
    group = (HIERARCHY if version_2 else HIERARCHY / "memory") / f"small-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    try:
        yield group
    finally:
        deadline = time.monotonic() + 30
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()


def put(process: int, group: Path) -> None:
    """Move a process into a group; those that it starts from now on are there, too."""
    (group / "cgroup.procs").write_text(str(process))


def tree(root: Path, membership: str, **files: str) -> Path:
    """A root whose control groups are these; ``__`` stands for ``/`` and ``_DOT_`` for ``.`` in their paths."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root
