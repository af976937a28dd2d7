"""Is a column distributed differently than in other rows? By the population stability index of both counts in bins.

Random samples differ, too: without a drift the index of n and m rows in k bins is about (1/n + 1/m) times chi-squared
with k - 1 degrees of freedom (Yurdakul and Naranjo, "Statistical Properties of the Population Stability Index", Journal
of Risk Model Validation 14, 2020). A drift is called one if it matters by the customary threshold, and if no more than
1 % of tables without any would show one in any of their columns (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.prepare.fit.splits import TRAIN

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


def found(drifts: Mapping[Place, Drift]) -> dict[Place, Drift]:
    """Those of all that were looked at which matter, and are no chance."""
    most = FALSE_ALARMS / max(len(drifts), 1)
    return {place: each for place, each in drifts.items() if each.index > MATTERS and each.chance < most}


def drift_by_split(binned: np.ndarray, splits: np.ndarray, ordered: bool) -> dict[str, Drift]:
    """Each held-out split against the training rows. ``ordered`` bins are merged with their neighbours where rows are
    few, others with all that are rare."""
    both = np.bincount(binned * len(SPLITS) + splits, minlength=len(SPLITS) * (int(binned.max(initial=0)) + 1))
    counts = both.reshape(-1, len(SPLITS)).T
    held_out = [split for split in range(len(SPLITS)) if split != TRAIN and counts[split].sum() >= ENOUGH]
    return {SPLITS[split]: drift(counts[TRAIN], counts[split], ordered) for split in held_out}


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


def drift_from(column: dict[str, Any], sample: pa.Table) -> Drift | None:
    """All rows of the ``sample`` against the ``column`` of an earlier card, where it can be said: by the bins of its
    histogram, or by its most frequent texts and all others together."""
    values = sample[column["name"]].drop_null()
    if "histogram" in column:
        numbers = values.to_numpy()
        edges = np.array(column["histogram"]["edges"])
        before = np.array(column["histogram"]["counts"], float)
        now = np.histogram(numbers[(numbers >= edges[0]) & (numbers <= edges[-1])], edges)[0].astype(float)
        # The histogram leaves out the outermost 0.5 % on each side, where there is anything.
        exceeds = [column.get("min", -np.inf) < edges[0], column.get("max", np.inf) > edges[-1]]
        outside = np.array(exceeds) * (0.005 / 0.99 * before.sum())
        beyond = [np.sum(numbers < edges[0]), np.sum(numbers > edges[-1])]
        before = np.concatenate([outside[:1], before, outside[1:]])
        now = np.concatenate([beyond[:1], now, beyond[1:]])
    elif column.get("top"):
        top = [text for text, _ in column["top"]]
        indices = pc.index_in(values.combine_chunks(), value_set=pa.array(top))
        binned = pc.fill_null(indices, len(top)).to_numpy(zero_copy_only=False)
        before = np.array([count for _, count in column["top"]] + [column.get("rest", 0)], float)
        now = np.bincount(binned, minlength=len(top) + 1)
    else:
        return None
    return drift(before, now, ordered="histogram" in column) if now.sum() >= ENOUGH else None
