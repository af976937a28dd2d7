"""The interval between checkpoints: a number of steps, a time, or the optimum for a failure rate.

If a checkpoint stalls the work for C seconds and machines fail every M seconds on average, the optimal interval is
about sqrt(2 C M) (Young 1974); Daly (2006, equation 37) adds the terms that matter when C is not small compared to M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Largest share of the time that saves may take, however often machines fail.
LARGEST_SHARE = 0.03
#: Longest interval, and so the most work that a failure can cost, however rarely machines fail.
LONGEST_S = 1800.0


def young_daly(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Seconds of work between two checkpoints for which checkpoints and failures together cost the least time."""
    if cost_s >= 2 * mean_time_between_failures_s:
        return mean_time_between_failures_s
    ratio = cost_s / (2 * mean_time_between_failures_s)
    young = math.sqrt(2 * cost_s * mean_time_between_failures_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(frozen=True)
class Interval:
    """Exactly one field is set, the others are 0."""

    steps: int = 0
    seconds: float = 0.0
    #: Seconds between failures of the whole job: of one machine, divided by the number of machines.
    mean_time_between_failures_s: float = 0.0

    def between(self, *, step_s: float, stall_s: float, publish_s: float) -> int:
        """Steps from one checkpoint to the next.

        The arguments are measured durations that the ranks agreed on, 0 while unknown: of a step, of the stall that a
        save causes in the step loop, and from a snapshot to its publication.
        """
        if self.steps:
            return self.steps
        if step_s <= 0:
            return 1
        if self.seconds:
            return max(1, round(self.seconds / step_s))
        best = young_daly(stall_s, self.mean_time_between_failures_s)
        # A save that begins before the previous one is published blocks the step loop.
        shortest = max(stall_s / LARGEST_SHARE, publish_s)
        return max(1, math.ceil(min(max(best, shortest), LONGEST_S) / step_s))
