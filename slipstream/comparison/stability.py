"""Is a column distributed differently than in other rows? By the population stability index of both counts in bins.

Random samples differ, too: without a drift the index of n and m rows in k bins is about (1/n + 1/m) times chi-squared
with k - 1 degrees of freedom (Yurdakul and Naranjo, "Statistical Properties of the Population Stability Index", Journal
of Risk Model Validation 14, 2020). A drift is called one if it matters by the customary threshold, and if no more than
1 % of tables without any would show one in any of their columns (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

#: An index below this does not matter, however many rows show it (Siddiqi, Credit Risk Scorecards, 2006).
MATTERS = 0.1
#: The share of tables without a drift in which one may be called so.
FALSE_ALARMS = 0.01
#: Fewer rows say too little.
ENOUGH = 50
#: The fewest rows expected in each bin, for chi-squared to hold, and the most bins of numbers: each more adds noise.
FEWEST, BINS = 15, 10

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True)
class Drift:
    """The population stability index, and the probability of one so large where nothing drifts."""

    index: float
    chance: float


def found(drifts: Mapping[Place, Drift], matters: float = MATTERS) -> dict[Place, Drift]:
    """Those of all that were looked at whose index is above ``matters``, and which are no chance."""
    most = FALSE_ALARMS / max(len(drifts), 1)
    return {place: each for place, each in drifts.items() if each.index > matters and each.chance < most}


def drift(before: np.ndarray, now: np.ndarray, ordered: bool) -> Drift:
    """Of counts in the same bins, both of which have rows."""
    from scipy.special import chdtrc

    before, now = merged(before, now) if ordered else with_rare_ones_together(before, now)
    noise = 1 / before.sum() + 1 / now.sum()
    shares = [(counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (before, now)]
    index = float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))
    return Drift(index, float(chdtrc(len(now) - 1, index / noise)) if len(now) > 1 else 1.0)


def expected(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Of the fewer rows in each bin, if nothing drifts."""
    return (before + now) * (min(before.sum(), now.sum()) / (before.sum() + now.sum()))


def with_rare_ones_together(before: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bins in which few rows are expected, as one; with the next rarest if that still has too few."""
    rows = expected(before, now)
    order = np.argsort(rows, kind="stable")
    rare = max(int(np.sum(rows < FEWEST)), 1)
    if rows[order[:rare]].sum() < FEWEST:
        rare += 1
    together, alone = order[:rare], order[rare:]
    before, now = (np.append(counts[alone], counts[together].sum()) for counts in (before, now))
    return before, now


def merged(before: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring bins together, until enough of the fewer rows are expected in each."""
    rows = expected(before, now)
    least, starts, inside = max(FEWEST, rows.sum() / BINS), [0], 0.0
    for at, more in enumerate(rows.tolist()):
        if inside >= least:
            starts.append(at)
            inside = 0.0
        inside += more
    if inside < least and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(before, starts), np.add.reduceat(now, starts)
