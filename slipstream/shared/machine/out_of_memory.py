"""Detection of the kernel's out-of-memory kills, by the counters of this process's control group.

A killed process leaves no message, and SIGKILL has other senders. The kernel counts its own kills in a group and all
groups in it: ``oom_kill`` in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1). The parent process
reads the counter before and after, unless the container is killed as a whole (``memory.oom.group``, Kubernetes' default
on version 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.machine.limits import control_group_paths, memory_limit, read_or_empty

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
