"""How many processor cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores in this process's affinity mask, where the system has one (Linux); else all cores of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
