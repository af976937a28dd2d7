"""Checkpoint directories: addresses, and the attempt that holds one.

Flyte gives every attempt its own output prefix in a random shard and tells an attempt only its predecessor's. A
checkpoint directory has the same address for all attempts, recoveries and relaunches of the same work, because its key
is a digest of the inputs that decide the result.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Parent directories of all checkpoint directories and of all sweep stores. They lie below Flyte's raw output, the
#: profile's ``checkpoints`` or ``.slipstream``.
HOMES = "checkpoints"
SWEEPS = "sweeps"


@dataclass(frozen=True)
class Holder:
    """Attempt that holds a checkpoint directory, as stored in its lease."""

    #: Name of Flyte's execution, torch elastic's run id, or "" if there is none.
    execution: str = ""
    #: Flyte's number of the attempt (from 0), or the number of torch elastic's restarts.
    attempt: int = 0
    #: Output prefix shared by all processes of this attempt and by no other attempt; "" if there is none.
    prefix: str = ""

    def succeeds(self, other: Holder) -> bool:
        """Return True if this attempt may take over from ``other``.

        That is so if ``other`` is an earlier attempt of the same execution, or this attempt before torch elastic
        restarted its workers.
        """
        if not self.execution or other.execution != self.execution:
            return False
        return other == self or other.attempt < self.attempt

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.execution}" if self.execution else "a run without a name"


def home_below(base: str, key: str, *above: str, among: str = HOMES) -> str:
    """Return the address below ``base`` of the checkpoint directory with this ``key``.

    ``above`` are the Flyte project and domain, or empty texts. ``among`` is ``HOMES`` or ``SWEEPS``.
    """
    return "/".join([base.rstrip("/"), among, *filter(None, above), key])
