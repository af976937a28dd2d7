"""What a loss would cost while a store stays away, and when to say so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: Seconds without a save from which on a store that has not failed, but is not done either, is worth a warning.
SLOW_S = 60.0


@dataclass
class Outage:
    """Since when nothing has been saved to ``home``. ``now`` is a clock in seconds."""

    home: str
    now: Callable[[], float] = time.monotonic
    #: The step of the last checkpoint, and when its snapshot was taken.
    step: int = 0
    since: float = field(init=False)
    #: When the first snapshot was taken that is not saved yet; None if there is none.
    tried: float | None = None
    #: Why the last save failed; "" if it did not.
    why: str = ""
    #: The seconds without a save after which there is a warning.
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.now()

    @property
    def seconds(self) -> float:
        """How old the work is that a loss would cost."""
        return self.now() - self.since

    @property
    def tried_s(self) -> float:
        """For how long there has been a snapshot that is not saved; 0 without one."""
        return 0.0 if self.tried is None else self.now() - self.tried

    def tries(self, taken: float) -> None:
        """A snapshot that was ``taken`` then is to be saved."""
        self.tried = taken if self.tried is None else self.tried

    def begin(self, step: int) -> None:
        """The work begins at ``step``."""
        self.step, self.since = step, self.now()

    def failed(self, why: str) -> None:
        self.why = why

    def saved(self, step: int, taken: float) -> str:
        """A checkpoint of ``step`` is published, whose snapshot was ``taken`` then. Returns what to say of it, if there
        was a warning."""
        self.step, self.since, self.why, self.tried = step, taken, "", None
        warned, self._next_s = self._next_s > 0, 0.0
        return f"saved again: step {step} at {self.home}" if warned else ""

    def warning(self, step: int) -> str:
        """A sentence, once nothing can be saved, and again each time that the loss has doubled; else empty."""
        lost_s = self.seconds
        if lost_s < (self._next_s or (0.0 if self.why else SLOW_S)):
            return ""
        self._next_s = max(2 * lost_s, 1.0)
        why = f" ({self.why})" if self.why else ""
        return (
            f"nothing saved at {self.home} for {lost_s:.0f} s{why}: a loss now would cost {step - self.step} steps; "
            "training goes on, and saves as soon as it can"
        )
