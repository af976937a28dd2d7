"""How many bits of a byte one model of text needs less than another, from the same documents.

The bytes of a document are no independent evidence, the documents are. The figure is a ratio of two sums over them, so
its interval is that of a ratio estimator (Cochran, "Sampling Techniques", 3rd edition, section 2.11): Student's
distribution of the mean of what each document's difference lies above what its bytes make one expect.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.artifacts.results.evaluation import Gain
from slipstream.artifacts.results.export import NO_LIMIT

LEVEL = 0.95


def bits_per_byte(bits: np.ndarray, sizes: np.ndarray) -> float:
    """Of all documents, of which each has so many ``bits`` and is so many bytes long."""
    return float(bits.sum() / sizes.sum())


def gain(before: np.ndarray, after: np.ndarray, sizes: np.ndarray) -> Gain:
    """The bits per byte that ``after`` needs less than ``before`` (both bits ``[documents]``), with a 95 % interval;
    of one document there is none."""
    from scipy.stats import t

    less, documents = before - after, len(sizes)
    value = bits_per_byte(less, sizes)
    if documents < 2:
        return Gain(value, -NO_LIMIT, NO_LIMIT)
    beyond = less - value * sizes
    deviation = math.sqrt(documents * float((beyond**2).sum()) / (documents - 1)) / float(sizes.sum())
    half = float(t.ppf((1 + LEVEL) / 2, documents - 1)) * deviation
    return Gain(value, value - half, value + half)
