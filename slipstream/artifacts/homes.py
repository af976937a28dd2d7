"""Homes of unfinished work: where a training keeps its checkpoints, and who works there.

Flyte gives each attempt a prefix of its own, below a random shard, and tells the next attempt that of its predecessor
alone. A home has one address for all attempts, recoveries and relaunches of the same work: its key is made of what the
result depends on.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The directory of all homes, below the raw output of Flyte, the profile's ``checkpoints``, or ``.slipstream``; and
#: beside it that of all stores of sweeps.
HOMES = "checkpoints"
SWEEPS = "sweeps"


@dataclass(frozen=True)
class Holder:
    """An attempt at some work, as its home records it."""

    #: The name of Flyte's execution, torch elastic's run id, or "" if there is none.
    execution: str = ""
    #: Flyte's number of the attempt (from 0), or how often torch elastic has restarted the workers.
    attempt: int = 0
    #: What all processes of this attempt share and no other attempt has; "" if there is no such thing.
    prefix: str = ""

    def succeeds(self, other: Holder) -> bool:
        """Whether ``other`` has ended or is about to: the workers before these of the same attempt, or an earlier
        attempt of the same execution."""
        if not self.execution or other.execution != self.execution:
            return False
        return other == self or other.attempt < self.attempt

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.execution}" if self.execution else "a run without a name"


def home_below(base: str, key: str, *above: str, among: str = HOMES) -> str:
    """The address of the home of the work ``key`` below ``base``; ``above`` are project and domain, where there are
    such."""
    return "/".join([base.rstrip("/"), among, *filter(None, above), key])
