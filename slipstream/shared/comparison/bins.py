"""Histograms with bins fitted to some rows and reused for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.artifacts.results.distributions import Bins
from slipstream.shared.comparison.stability import BINS

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
