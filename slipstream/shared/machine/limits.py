"""CPU and memory limits of this process, and the kernel's counters of killed processes.

A pod sees all cores of its node. So the amounts of its placement are passed in environment variables, and a placement
uses the same number of threads on every type of node.

A container's control group (version 2 or 1) limits CPU and memory, and so do all groups above it. A container usually
sees its own group as the root of the mounted groups. If the kernel names a path that does not exist there, only the
root counts.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: Limits from here on mean "no limit": version 1 reports the largest multiple of the page size.
UNLIMITED_BYTES = 1 << 60
SCALES = {
    "m": 1e-3,
    "": 1.0,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTP", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)},
}
QUANTITY = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(SCALES)})")
#: Upper bound of quantities that Kubernetes represents exactly.
LARGEST_QUANTITY = 2.0**63
#: Environment variable with the placement's ``memory``, set in pods.
MEMORY = "SLIPSTREAM_MEMORY"
#: Environment variable with the placement's ``cpu``, set in pods.
CPU = "SLIPSTREAM_CPU"


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs to which this process's group is limited, or None; ``root`` holds /proc and /sys."""
    quotas = []
    for group in control_group_paths(root, "cpu"):
        quota, _, period = read_or_empty(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = read_or_empty(group / "cpu.cfs_quota_us"), read_or_empty(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> float | None:
    """Return the memory limit of this process's group in bytes, or None."""
    values = (
        read_or_empty(group / name)
        for group in control_group_paths(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return min((float(value) for value in values if value.isdigit() and int(value) < UNLIMITED_BYTES), default=None)


def memory_used(root: Path = Path("/")) -> int:
    """Return the bytes used by this process's control group, without reclaimable file pages."""
    for group in control_group_paths(root, "memory"):
        for name, pages in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
            used = read_or_empty(group / name)
            if used.isdigit():
                return max(0, int(used) - parse_counters(group / "memory.stat").get(pages, 0))
    return 0


def cpu_seconds(root: Path = Path("/")) -> float | None:
    """Return the CPU seconds of this process's control group; None if they are not counted."""
    for group in control_group_paths(root, "cpuacct"):
        nanoseconds = read_or_empty(group / "cpuacct.usage")
        if nanoseconds.isdigit():
            return int(nanoseconds) / 1e9
    for group in control_group_paths(root, "cpu"):
        microseconds = parse_counters(group / "cpu.stat").get("usage_usec")
        if microseconds is not None:
            return microseconds / 1e6
    return None


@dataclass(frozen=True)
class Throttling:
    """Cumulative throttling by a CPU quota: periods, throttled periods, and throttled seconds."""

    periods: int = 0
    throttled_periods: int = 0
    seconds: float = 0.0


def cpu_throttling(root: Path = Path("/")) -> Throttling:
    """Return the longest throttling among this process's group and those above it; zeros without a quota."""
    found = [Throttling()]
    for group in control_group_paths(root, "cpu"):
        stat = parse_counters(group / "cpu.stat")
        seconds = stat.get("throttled_usec", 0) / 1e6 or stat.get("throttled_time", 0) / 1e9
        found.append(Throttling(stat.get("nr_periods", 0), stat.get("nr_throttled", 0), seconds))
    return max(found, key=lambda throttling: (throttling.seconds, throttling.periods))


def control_group_paths(root: Path, controller: str) -> Iterator[Path]:
    """Yield the existing directories of this process's group and those above it, for both cgroup versions."""
    mounted = root / "sys/fs/cgroup"
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, group_path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        path = PurePosixPath(group_path.lstrip("/"))
        for group in (path, *path.parents):
            if (top / group).is_dir():
                yield top / group


def read_or_empty(path: Path) -> str:
    """Return the file's text, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def parse_counters(path: Path) -> dict[str, int]:
    """Parse a file of lines ``name number``; other lines are skipped."""
    lines = (line.split() for line in read_or_empty(path).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def parse_quantity(text: str) -> float:
    """Parse a Kubernetes quantity of CPUs or bytes; raises ``ValueError`` if it is invalid."""
    match = QUANTITY.fullmatch(text)
    if not match or (number := float(match[1]) * SCALES[match[2]]) >= LARGEST_QUANTITY:
        raise ValueError(f"{text!r} is not a Kubernetes quantity")
    return number


def quantity_in_environment(variable: str) -> float | None:
    """Return the quantity in an environment variable; None if it is unset."""
    text = os.environ.get(variable)
    return parse_quantity(text) if text else None


def memory_allowed(root: Path = Path("/")) -> float | None:
    """Return the smaller memory limit in bytes of placement and control group; None without either."""
    limits = (memory_limit(root), quantity_in_environment(MEMORY))
    return min((limit for limit in limits if limit is not None), default=None)


def visible_cores() -> int:
    """Return the number of cores in this process's affinity mask; on macOS all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def group_cpus(root: Path = Path("/")) -> float:
    """Return the minimum of visible cores and the control group's CPU quota."""
    return float(min(visible_cores(), cpu_quota(root) or math.inf))


def usable_cpus(root: Path = Path("/")) -> float:
    """Return the minimum of :func:`group_cpus` and the placement's CPUs."""
    return min(group_cpus(root), quantity_in_environment(CPU) or math.inf)


def usable_cores() -> int:
    """Return :func:`usable_cpus` rounded down; at least 1."""
    return max(1, int(usable_cpus()))


# A killed process leaves no message, and SIGKILL has other senders. The kernel counts its own kills in a group and all
# groups in it: ``oom_kill`` in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1). The parent process
# reads the counter before and after, unless the container is killed as a whole (``memory.oom.group``, Kubernetes'
# default on version 2).
#: Fraction of the limit from which a peak counts as having met the limit, because pages are charged to a group in
#: batches.
AT_LIMIT = 0.95
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryCounters:
    """Killed processes of this process's control group, and its memory in bytes.

    ``limit`` may be a parent group's; None without a limit. ``peak`` is None if the kernel does not report it.
    """

    kills: int = 0
    peak: int | None = None
    limit: float | None = None

    @property
    def at_limit(self) -> bool:
        """True if the group's limit was met; otherwise the node ran out of memory."""
        return self.limit is not None and (self.peak is None or self.peak >= AT_LIMIT * self.limit)


def memory_counters(root: Path = Path("/")) -> MemoryCounters:
    """Return the group's current counters; ``root`` holds /proc and /sys."""
    for group in control_group_paths(root, "memory"):
        events = read_or_empty(group / "memory.events") or read_or_empty(group / "memory.oom_control")
        counted = dict(line.split() for line in events.splitlines() if len(line.split()) == 2)
        if "oom_kill" in counted:
            peaks = (read_or_empty(group / name) for name in ("memory.peak", "memory.max_usage_in_bytes"))
            peak = next((int(value) for value in peaks if value.isdigit()), None)
            return MemoryCounters(int(counted["oom_kill"]), peak, memory_limit(root))
    return MemoryCounters()


def what_was_killed(before: MemoryCounters, now: MemoryCounters) -> str:
    """Describe the kernel's kills since ``before`` as the start of a message; "" without any.

    >>> what_was_killed(MemoryCounters(0), MemoryCounters(1, 2 * GIB, 2 * GIB))
    'out of memory: the kernel killed 1 process at the limit of 2 GiB (peak 2 GiB)'
    """
    killed = now.kills - before.kills
    if killed <= 0:
        return ""
    processes = f"{killed} process{'es' if killed > 1 else ''}"
    if not now.at_limit or now.limit is None:
        return f"out of memory: the kernel killed {processes}, as this node had too little memory"
    peak = "" if now.peak is None else f" (peak {now.peak / GIB:.3g} GiB)"
    return f"out of memory: the kernel killed {processes} at the limit of {now.limit / GIB:.3g} GiB{peak}"
