"""How much memory the processes of this pod or container may use together."""

from __future__ import annotations

from slipstream.machine.cgroup import memory_limit
from slipstream.machine.quantities import quantity_in_environment

#: The placement's ``memory``, in a pod.
MEMORY = "SLIPSTREAM_MEMORY"


def memory_allowed() -> float | None:
    """Bytes: the smaller of what the placement gave the pod and the control group's limit. None if there is neither:
    then it is the machine's."""
    limits = (memory_limit(), quantity_in_environment(MEMORY))
    return min((limit for limit in limits if limit is not None), default=None)
