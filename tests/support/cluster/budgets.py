"""The end of an attempt, and the retry budget charged for the next (``executor.go: isEligibleForRetry``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: propeller's ``max-node-retries-system-failures``. The failure after these ends the node.
SYSTEM_RETRIES = 3

Payer = Literal["", "user", "system"]


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended: a success has no payer, and a failure that is not recoverable has one to no avail."""

    payer: Payer
    cause: str
    recoverable: bool = True

    @property
    def succeeded(self) -> bool:
        return not self.payer


@dataclass
class Budget:
    """What a node has spent. ``retries`` is the user's budget; the system's is the same for all nodes."""

    retries: int
    interruptible: bool
    user: int = 0
    system: int = 0

    @property
    def on_spot(self) -> bool:
        """Whether the next attempt runs where it can be interrupted: the last that the system pays for does not."""
        return self.interruptible and self.system < SYSTEM_RETRIES

    def spend(self, verdict: Verdict) -> bool:
        """Count a failed attempt. Returns whether there is another."""
        if verdict.payer == "system":
            self.system += 1
            left = self.system <= SYSTEM_RETRIES
        else:
            self.user += 1
            left = self.user <= self.retries
        return left and verdict.recoverable
