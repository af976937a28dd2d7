"""Is a setting faster than the one in use? Decided from turns, in which both were timed one after the other.

The load of a machine changes from second to second, so times are compared within a turn only. A winner has to be
faster by at least ``MATTERS``, at a level that is divided by the number of settings that are tried (Bonferroni), so
that of all tunings without a better setting at most ``FALSE_ALARMS`` name one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

FALSE_ALARMS = 0.01
MATTERS = 0.03
FEWEST_TURNS = 5


@dataclass(frozen=True)
class Decision:
    """What the turns say: ``gain`` is the time of the setting in use over that of the other, 1 for no difference."""

    #: Whether the other setting is to be taken.
    change: bool
    gain: float
    #: The interval of the gain at the corrected level.
    low: float
    high: float
    turns: int
    #: A gain of less than this share may have gone unseen.
    unseen: float

    def __str__(self) -> str:
        gain = f"{self.gain:.2f} times as fast ({self.low:.2f} to {self.high:.2f}, {self.turns} turns)"
        return gain if self.change else f"no change: {gain}; a gain of less than {self.unseen:.0%} would not be seen"


def decide(in_use: Sequence[float], other: Sequence[float], tried: int) -> Decision:
    """Judge the seconds of each turn; ``tried`` is how many settings are tried altogether.

    The interval is Student's t for the mean of the logarithms of the turns' ratios. A one-sided test at the level
    ``FALSE_ALARMS / tried``; a gain that is too small to matter is none.
    """
    if len(in_use) != len(other) or len(in_use) < FEWEST_TURNS:
        raise ValueError(f"a decision takes {FEWEST_TURNS} turns of both settings, not {len(in_use)} and {len(other)}")
    ratios = np.log(np.asarray(in_use) / np.asarray(other))
    turns, middle = len(ratios), float(ratios.mean())
    quantile = float(student.ppf(1 - FALSE_ALARMS / tried, turns - 1))
    half = quantile * float(ratios.std(ddof=1)) / turns**0.5
    change = middle - half > 0 and middle >= np.log1p(MATTERS)
    gain, low, high = (float(np.exp(middle + sign * half)) for sign in (0, -1, 1))
    return Decision(bool(change), gain, low, high, turns, max(MATTERS, float(np.expm1(2 * half))))
