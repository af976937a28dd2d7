"""Drift test of a column by the population stability index of its counts in bins.

Random samples differ, too: without drift, the index of n and m rows in k bins is about (1/n + 1/m) times chi-squared
with k - 1 degrees of freedom (Yurdakul and Naranjo, "Statistical Properties of the Population Stability Index", Journal
of Risk Model Validation 14, 2020). A drift is reported if it exceeds the customary threshold and is significant: at
most 1 % of tables without drift report any column (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

#: A smaller index is irrelevant, however many rows show it (Siddiqi, Credit Risk Scorecards, 2006).
MATTERS = 0.1
#: Share of tables without drift that may report a drift.
FALSE_ALARMS = 0.01
#: Minimum number of rows for a test.
ENOUGH = 50
#: Minimum expected rows per bin, for chi-squared to hold, and maximum bins of numbers, as every bin adds noise.
FEWEST, BINS = 15, 10

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True)
class DriftTest:
    """Population stability index, and its p-value ``chance`` under no drift."""

    index: float
    chance: float


def significant_drifts(drifts: Mapping[Place, DriftTest], matters: float = MATTERS) -> dict[Place, DriftTest]:
    """Return the significant drifts above ``matters``, corrected for the number of ``drifts``."""
    most = FALSE_ALARMS / max(len(drifts), 1)
    return {place: each for place, each in drifts.items() if each.index > matters and each.chance < most}


def drift_test(before: np.ndarray, now: np.ndarray, ordered: bool) -> DriftTest:
    """Return the drift from ``before`` to ``now``, non-empty counts in the same bins.

    Bins with few rows are merged: neighbours if ``ordered``, else the rarest.
    """
    from scipy.special import chdtrc

    before, now = merge_sparse_bins(before, now) if ordered else with_rare_ones_together(before, now)
    noise = 1 / before.sum() + 1 / now.sum()
    shares = [(counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (before, now)]
    index = float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))
    return DriftTest(index, float(chdtrc(len(now) - 1, index / noise)) if len(now) > 1 else 1.0)


def expected_counts(before: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Return the rows of the smaller sample expected per bin without drift."""
    return (before + now) * (min(before.sum(), now.sum()) / (before.sum() + now.sum()))


def with_rare_ones_together(before: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge all bins with fewer than ``FEWEST`` expected rows, and the next rarest if their sum is still less."""
    rows = expected_counts(before, now)
    order = np.argsort(rows, kind="stable")
    rare = max(int(np.sum(rows < FEWEST)), 1)
    if rows[order[:rare]].sum() < FEWEST:
        rare += 1
    together, alone = order[:rare], order[rare:]
    before, now = (np.append(counts[alone], counts[together].sum()) for counts in (before, now))
    return before, now


def merge_sparse_bins(before: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring bins until each has enough expected rows of the smaller sample."""
    rows = expected_counts(before, now)
    least, starts, inside = max(FEWEST, rows.sum() / BINS), [0], 0.0
    for at, more in enumerate(rows.tolist()):
        if inside >= least:
            starts.append(at)
            inside = 0.0
        inside += more
    if inside < least and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(before, starts), np.add.reduceat(now, starts)
