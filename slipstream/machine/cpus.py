"""How many processor cores this process may use.

A pod sees the cores of its whole node. What its placement gave it travels in the task's environment, so that the same
placement computes with the same number of threads on every type of node. One machine has no placement: the environment
of a task only reaches pods.
"""

from __future__ import annotations

import os

from slipstream.machine.cgroup import cpu_quota
from slipstream.machine.quantities import quantity_in_environment

#: The placement's ``cpu``, in a pod.
CPU = "SLIPSTREAM_CPU"


def visible_cores() -> int:
    """The cores in this process's affinity mask; all cores of the machine where the system has no such mask (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """The smallest of: the visible cores, this process's control group's CPU quota, and what the placement gave the
    pod. Fractions are rounded down; at least 1."""
    limits = (visible_cores(), cpu_quota(), quantity_in_environment(CPU))
    return max(1, int(min(limit for limit in limits if limit is not None)))
