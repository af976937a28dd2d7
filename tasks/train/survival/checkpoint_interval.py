"""When to save: every so many steps, every so many seconds, or as often as failures make it worth.

The best interval between checkpoints that stop the work for C seconds each, on machines that fail every M seconds, is
about sqrt(2 C M) (Young 1974); Daly (2006, equation 37) adds the terms that matter when C is no longer small beside M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Saves never take more than this share of the time, however often machines fail.
LARGEST_SHARE = 0.03
#: No interval is longer than this, however rarely machines fail: half an hour is lost at most.
LONGEST_S = 1800.0


def young_daly(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds of work between two checkpoints that lose the least, to checkpoints and failures together."""
    if cost_s >= 2 * mean_time_between_failures_s:
        return mean_time_between_failures_s
    ratio = cost_s / (2 * mean_time_between_failures_s)
    young = math.sqrt(2 * cost_s * mean_time_between_failures_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(frozen=True)
class Interval:
    """One of three ways; the others are 0. All give a number of *steps*, from figures that the ranks agreed on."""

    steps: int = 0
    seconds: float = 0.0
    #: Mean time between failures, in seconds, of the whole job (one machine's divided by their number).
    mean_time_between_failures_s: float = 0.0

    def between(self, *, step_s: float, stall_s: float, publish_s: float) -> int:
        """Steps from one checkpoint to the next. ``step_s`` is a step's time, ``stall_s`` what a save costs the loop,
        ``publish_s`` what it takes until it is published; all measured, 0 while unknown."""
        if self.steps:
            return self.steps
        if step_s <= 0:
            return 1
        if self.seconds:
            return max(1, round(self.seconds / step_s))
        best = young_daly(stall_s, self.mean_time_between_failures_s)
        # A save cannot begin before the one before is published without holding up the loop.
        shortest = max(stall_s / LARGEST_SHARE, publish_s)
        return max(1, math.ceil(min(max(best, shortest), LONGEST_S) / step_s))
