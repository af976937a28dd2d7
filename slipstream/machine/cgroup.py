"""The limits that a container's control group sets: the CPU quota and the memory, of version 2 or 1.

A group is bound by its own limits and by those of all groups above it. A container usually sees its own group as the
root of the file system; where it does not, the path of its group leads nowhere there, and the root counts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: Version 1 writes the largest multiple of the page size for "no limit".
UNLIMITED_BYTES = 1 << 60


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPUs that this process's group may use per second, None without a limit. ``root`` holds /proc and /sys."""
    found = []
    for group in groups(root, "cpu"):
        quota, _, period = read(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(root: Path = Path("/")) -> float | None:
    """The bytes of memory that this process's group may use, None without a limit."""
    values = (
        read(group / name) for group in groups(root, "memory") for name in ("memory.max", "memory.limit_in_bytes")
    )
    return min((float(value) for value in values if value.isdigit() and int(value) < UNLIMITED_BYTES), default=None)


def groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's group and of those above it that are there, in both versions' hierarchies."""
    mounted = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        path = PurePosixPath(place.lstrip("/"))
        for group in (path, *path.parents):
            if (top / group).is_dir():
                yield top / group


def read(path: Path) -> str:
    """What the file says, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
