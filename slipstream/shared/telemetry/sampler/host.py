"""Usage of the pod's control group, and the time its processes waited for a processor."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from slipstream.shared.machine.limits import (
    cpu_seconds,
    cpu_throttling,
    memory_allowed,
    memory_used,
    read_or_empty,
    usable_cpus,
)
from slipstream.shared.telemetry.records import HostReading

ROOT = Path("/")
#: Seconds between reads of the limits, which hardly change.
LIMITS_S = 60.0
#: Maximum fraction of a processor for counting waits; with thousands of threads they are counted less often.
SHARE = 0.001
#: Columns of /proc/stat that count as busy: all but "idle", "iowait" and guests, which "user" includes.
WORKING = (0, 1, 2, 5, 6, 7)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class HostUsage:
    """Reader of the pod's usage; waits are those of descendants of the process ``watched``."""

    def __init__(self, watched: int, root: Path = ROOT) -> None:
        self._root = root
        self._waits = CpuWaits(watched, root)
        self._limits_at = -LIMITS_S
        self._cpus: float = 0.0
        self._memory: int | None = None

    def read(self) -> HostReading:
        if time.monotonic() - self._limits_at >= LIMITS_S:
            self._limits_at = time.monotonic()
            self._cpus, self._memory = usable_cpus(self._root), memory_limit_of(self._root)
        throttling, cpu = cpu_throttling(self._root), cpu_seconds(self._root)
        return HostReading(
            cpu_seconds=machine_seconds(self._root) if cpu is None else cpu,
            cpus=self._cpus,
            cpu_wait_seconds=self._waits.seconds(),
            throttled_seconds=throttling.seconds,
            throttled_periods=throttling.throttled_periods,
            periods=throttling.periods,
            memory_used_bytes=memory_used_of(self._root),
            memory_limit_bytes=self._memory,
        )


def memory_limit_of(root: Path) -> int | None:
    """Return the memory limit of the pod, else of the machine, in bytes."""
    allowed = memory_allowed(root)
    return machine_memory(root).get("MemTotal") if allowed is None else int(allowed)


def memory_used_of(root: Path) -> int | None:
    """Return the memory in use by the control group, else by the machine, in bytes."""
    used = memory_used(root)
    if used:
        return used
    machine = machine_memory(root)
    return machine["MemTotal"] - machine["MemAvailable"] if {"MemTotal", "MemAvailable"} <= machine.keys() else None


def machine_memory(root: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes, by name."""
    lines = (line.split() for line in read_or_empty(root / "proc/meminfo").splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3}


def machine_seconds(root: Path) -> float:
    """Return the CPU time of all processes in seconds; 0 without /proc."""
    ticks = read_or_empty(root / "proc/stat").partition("\n")[0].split()[1:]
    return sum(int(ticks[place]) for place in WORKING) * TICK_S if len(ticks) > max(WORKING) else 0.0


class CpuWaits:
    """Counter of the seconds that a process's descendants were ready without a processor.

    This process is excluded. The kernel counts per thread and forgets ended threads; counted seconds are kept.
    """

    def __init__(self, ancestor: int, root: Path = ROOT) -> None:
        self._ancestor = ancestor
        self._processes = str(root / "proc")
        self._seen: dict[str, int] = {}
        self._nanoseconds = 0
        self._next = 0.0

    def seconds(self) -> float:
        """Return the seconds; costlier counts are made less often."""
        if time.monotonic() >= self._next:
            began, cost = time.monotonic(), time.thread_time()
            self._count()
            self._next = began + (time.thread_time() - cost) / SHARE
        return self._nanoseconds / 1e9

    def _count(self) -> None:
        seen = {}
        for process in descendant_processes(self._ancestor, self._processes):
            threads = f"{self._processes}/{process}/task"
            with contextlib.suppress(OSError):  # the process has ended
                for thread in os.scandir(threads):
                    fields = first_bytes(f"{thread.path}/schedstat").split()
                    if len(fields) > 1:
                        seen[thread.name] = int(fields[1])
        # A smaller value than before means that another thread got the same id.
        for number, waited in seen.items():
            before = self._seen.get(number, 0)
            self._nanoseconds += waited - before if waited >= before else waited
        self._seen = seen


def descendant_processes(ancestor: int, processes: str) -> list[str]:
    """Return the ids of processes below ``ancestor``, without this process and its descendants."""
    children: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):  # a system without /proc
        for process in os.scandir(processes):
            if process.name.isdecimal():
                fields = first_bytes(f"{process.path}/stat").rpartition(b")")[2].split()
                if len(fields) > 1:
                    children.setdefault(fields[1].decode(), []).append(process.name)
    found, below = list[str](), [str(ancestor)]
    while below:
        young = [child for child in children.get(below.pop(), []) if child != str(os.getpid())]
        found += young
        below += young
    return found


def first_bytes(path: str) -> bytes:
    """Return up to 1,024 bytes of a file; empty if it is gone.

    Takes a tenth of the time of ``Path.read_bytes``.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 1024)
    except OSError:
        return b""
    finally:
        os.close(file)
