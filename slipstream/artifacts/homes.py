"""Checkpoint directories: where a training keeps its checkpoints, and which attempt holds one.

Flyte gives every attempt its own prefix below a random shard, and passes only the predecessor's to the next attempt. A
checkpoint directory has one address for all attempts, recoveries and relaunches of the same work: its key is made of
the inputs that decide the result.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Parent of all checkpoint directories and, next to it, of all stores of sweeps; below Flyte's raw output, the
#: profile's ``checkpoints`` or ``.slipstream``.
HOMES = "checkpoints"
SWEEPS = "sweeps"


@dataclass(frozen=True)
class Holder:
    """Attempt at some work, as its checkpoint directory records it."""

    #: Name of Flyte's execution, torch elastic's run id, or "" if there is none.
    execution: str = ""
    #: Flyte's number of the attempt (from 0), or the count of torch elastic's restarts.
    attempt: int = 0
    #: Prefix that all processes of this attempt share and no other attempt has; "" if there is none.
    prefix: str = ""

    def succeeds(self, other: Holder) -> bool:
        """Return True if ``other`` has ended or is about to.

        It is then this attempt before its workers restarted, or an earlier attempt of the same execution.
        """
        if not self.execution or other.execution != self.execution:
            return False
        return other == self or other.attempt < self.attempt

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.execution}" if self.execution else "a run without a name"


def home_below(base: str, key: str, *above: str, among: str = HOMES) -> str:
    """Return the address of the checkpoint directory of the work ``key`` below ``base``.

    ``above`` are project and domain, where they exist.
    """
    return "/".join([base.rstrip("/"), among, *filter(None, above), key])
