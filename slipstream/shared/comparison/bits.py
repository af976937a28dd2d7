"""Gain in bits per byte of one text model over another, from the same documents.

Documents are independent, the bytes within a document are not. The gain is a ratio of two sums over documents, so its
interval is the ratio estimator's (Cochran, "Sampling Techniques", 3rd edition, section 2.11): Student's interval of the
mean residual, a document's saved bits less the gain times its bytes.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.shared.artifacts.results.evaluation import Gain
from slipstream.shared.artifacts.results.export import NO_LIMIT

LEVEL = 0.95


def bits_per_byte(bits: np.ndarray, sizes: np.ndarray) -> float:
    """Return the bits per byte of all documents; ``bits`` and ``sizes`` (bytes) are ``[documents]``."""
    return float(bits.sum() / sizes.sum())


def bits_per_byte_gain(before: np.ndarray, after: np.ndarray, sizes: np.ndarray) -> Gain:
    """Return the bits per byte that ``after`` saves over ``before``, with a 95 % interval.

    Both are bits ``[documents]``. For a single document the interval is unbounded.
    """
    from scipy.stats import t

    less, documents = before - after, len(sizes)
    value = bits_per_byte(less, sizes)
    if documents < 2:
        return Gain(value, -NO_LIMIT, NO_LIMIT)
    beyond = less - value * sizes
    deviation = math.sqrt(documents * float((beyond**2).sum()) / (documents - 1)) / float(sizes.sum())
    half = float(t.ppf((1 + LEVEL) / 2, documents - 1)) * deviation
    return Gain(value, value - half, value + half)
