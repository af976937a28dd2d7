"""Optimal interval between checkpoints for a known failure rate.

If a checkpoint stalls the work for C seconds and machines fail every M seconds on average, the optimum is about sqrt(2
C M) (Young 1974); Daly (2006, equation 37) adds the terms that matter unless C is small compared to M.
"""

from __future__ import annotations

import math

#: Largest share of the time that saves may take, however often machines fail.
LARGEST_SHARE = 0.03
#: Longest interval, and so the most work that a failure can cost, however rarely machines fail.
LONGEST_S = 1800.0


def young_daly(cost_s: float, mean_time_between_failures_s: float) -> float:
    """Return the seconds between checkpoints that minimise the time lost to checkpoints and failures."""
    if cost_s >= 2 * mean_time_between_failures_s:
        return mean_time_between_failures_s
    ratio = cost_s / (2 * mean_time_between_failures_s)
    young = math.sqrt(2 * cost_s * mean_time_between_failures_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def best_seconds(stall_s: float, publish_s: float, mean_time_between_failures_s: float) -> float:
    """Return the trainer's interval in seconds: the optimum within bounds.

    Saves take at most :data:`LARGEST_SHARE` of the time, a save starts only after the last is published (otherwise it
    would block the steps), and the interval is at most :data:`LONGEST_S`.
    """
    best = young_daly(stall_s, mean_time_between_failures_s)
    return min(max(best, stall_s / LARGEST_SHARE, publish_s), LONGEST_S)
