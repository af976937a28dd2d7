"""Drift test of a column by the population stability index of its counts in bins.

Random samples differ, too: without drift, the index of n and m rows in k bins is about (1/n + 1/m) times chi-squared
with k - 1 degrees of freedom (Yurdakul and Naranjo, "Statistical Properties of the Population Stability Index", Journal
of Risk Model Validation 14, 2020). A drift is reported if it exceeds the customary threshold and is significant: at
most 1 % of tables without drift report any column (Bonferroni).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.artifacts.results.scoring import Bins

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


#: Number of texts, the most frequent, that have a bin of their own.
OWN_BIN = 30


def fit_numbers(numbers: np.ndarray) -> Bins:
    """Return bins with about equal counts of ``numbers`` (float64 ``[rows]``, NaN for missing).

    Edges lie between two numbers that occur, so that rounding moves no number to another bin.
    """
    values, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
    below = np.cumsum(counts) / max(counts.sum(), 1)
    ends = np.unique(np.searchsorted(below, np.arange(1, BINS) / BINS))
    ends = ends[ends < len(values) - 1]
    # Halved before the addition: the sum of the largest numbers overflows.
    edges = np.unique(values[ends] / 2 + values[ends + 1] / 2).tolist()
    empty = Bins(edges, [], [0] * (len(edges) + 2))
    return replace(empty, counts=count_numbers(empty, numbers).tolist())


def fit_texts(counts: Counter[str], missing: int, others: int = 0) -> Bins:
    """Return a bin for each of the most frequent texts, and one each for missing and all other texts.

    ``others`` is the number of rows whose text is not in ``counts``.
    """
    texts = [text for text, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:OWN_BIN]]
    own = [counts[text] for text in texts]
    return Bins([], texts, [missing, *own, others + counts.total() - sum(own)])


def count_numbers(bins: Bins, numbers: np.ndarray) -> np.ndarray:
    """Return the counts per bin, int64 ``[bins]``, of ``numbers`` (float64 ``[rows]``, NaN for missing)."""
    places = 1 + np.searchsorted(bins.edges, numbers, side="left")
    places[np.isnan(numbers)] = 0
    return np.bincount(places, minlength=len(bins.counts))


def count_texts(bins: Bins, texts: pa.DictionaryArray) -> np.ndarray:
    """Return the counts of ``texts`` per bin, int64 ``[bins]``.

    A missing text is a null index, or the index of a null.
    """
    known = pc.fill_null(pc.index_in(texts.dictionary, value_set=pa.array(bins.texts, pa.string())), len(bins.texts))
    there = texts.dictionary.is_valid().to_numpy(zero_copy_only=False)
    places = np.append(np.where(there, 1 + known.to_numpy(zero_copy_only=False), 0), 0)
    codes = pc.fill_null(texts.indices, len(places) - 1).to_numpy(zero_copy_only=False)
    return np.bincount(places[codes], minlength=len(bins.counts))


def fit_predictions(outputs: np.ndarray, classes: Sequence[str]) -> Bins:
    """Return bins of a model's predictions; ``outputs`` as for :func:`count_predictions`."""
    if len(classes) <= 2:
        return fit_numbers(score_of(outputs, classes))
    predicted = np.bincount(outputs.argmax(axis=1), minlength=len(classes))
    return fit_texts(Counter(dict(zip(classes, predicted.tolist(), strict=True))), missing=0)


def count_predictions(bins: Bins, outputs: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return the counts of predictions per bin, int64 ``[bins]``.

    ``outputs`` are probabilities ``[rows, classes]``, or values ``[rows, 1]`` without classes.
    """
    if len(classes) <= 2:
        return count_numbers(bins, score_of(outputs, classes))
    names = pa.array(classes, pa.string())
    return count_texts(bins, pa.DictionaryArray.from_arrays(pa.array(outputs.argmax(axis=1)), names))


def score_of(outputs: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Return the probability of the second class, or the value without classes."""
    return outputs[:, 1 if classes else 0].astype(np.float64)
