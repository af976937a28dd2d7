"""Values counted in bins: fitted to some rows, and the same bins for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.artifacts.results.distributions import Bins
from slipstream.comparison.stability import BINS

#: Texts that have a bin of their own, the most frequent.
OWN_BIN = 30


def fit_numbers(numbers: np.ndarray) -> Bins:
    """Bins of about as many of the ``numbers`` (float64 ``[rows]``, NaN for missing) each, with their counts.

    An edge lies between two numbers that occur: what rounding makes of a number stays in its bin.
    """
    values, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
    below = np.cumsum(counts) / max(counts.sum(), 1)
    ends = np.unique(np.searchsorted(below, np.arange(1, BINS) / BINS))
    ends = ends[ends < len(values) - 1]
    # Halved before they are added: the largest numbers have no sum.
    edges = np.unique(values[ends] / 2 + values[ends + 1] / 2).tolist()
    empty = Bins(edges, [], [0] * (len(edges) + 2))
    return replace(empty, counts=count_numbers(empty, numbers).tolist())


def fit_texts(counts: Counter[str], missing: int, others: int = 0) -> Bins:
    """A bin for each of the most frequent texts. ``others`` are rows of texts that nobody knows any more."""
    texts = [text for text, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:OWN_BIN]]
    own = [counts[text] for text in texts]
    return Bins([], texts, [missing, *own, others + counts.total() - sum(own)])


def count_numbers(bins: Bins, numbers: np.ndarray) -> np.ndarray:
    """int64 ``[bins]``: how many of the ``numbers`` (float64 ``[rows]``, NaN for missing) are in each."""
    places = 1 + np.searchsorted(bins.edges, numbers, side="left")
    places[np.isnan(numbers)] = 0
    return np.bincount(places, minlength=len(bins.counts))


def count_texts(bins: Bins, texts: pa.DictionaryArray) -> np.ndarray:
    """int64 ``[bins]``: how many of the ``texts`` are in each. Missing ones are null, or codes of a null."""
    known = pc.fill_null(pc.index_in(texts.dictionary, value_set=pa.array(bins.texts, pa.string())), len(bins.texts))
    there = texts.dictionary.is_valid().to_numpy(zero_copy_only=False)
    places = np.append(np.where(there, 1 + known.to_numpy(zero_copy_only=False), 0), 0)
    codes = pc.fill_null(texts.indices, len(places) - 1).to_numpy(zero_copy_only=False)
    return np.bincount(places[codes], minlength=len(bins.counts))


def fit_predictions(outputs: np.ndarray, classes: Sequence[str]) -> Bins:
    """Bins of what a model predicts, ``outputs`` as :func:`count_predictions` takes them."""
    if len(classes) <= 2:
        return fit_numbers(score_of(outputs, classes))
    predicted = np.bincount(outputs.argmax(axis=1), minlength=len(classes))
    return fit_texts(Counter(dict(zip(classes, predicted.tolist(), strict=True))), missing=0)


def count_predictions(bins: Bins, outputs: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """int64 ``[bins]``, of probabilities ``[rows, classes]``, or of values ``[rows, 1]`` where there are no classes."""
    if len(classes) <= 2:
        return count_numbers(bins, score_of(outputs, classes))
    names = pa.array(classes, pa.string())
    return count_texts(bins, pa.DictionaryArray.from_arrays(pa.array(outputs.argmax(axis=1)), names))


def score_of(outputs: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """The probability of the second class, or the value."""
    return outputs[:, 1 if classes else 0].astype(np.float64)
