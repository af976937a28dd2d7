"""Exact confidence limits of a proportion, by Clopper and Pearson.

"The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial", Biometrika 26, 1934.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def upper_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """Return the upper confidence limit of a proportion, after ``hits`` in ``rows`` draws.

    The true proportion exceeds it with probability at most ``error``.
    """
    from scipy.stats import beta

    hits = np.asarray(hits, float)
    others = np.maximum(rows - hits, 1e-9)  # avoids 0, for which the limit is 1 anyway
    return np.where(hits < rows, beta.ppf(1 - error, hits + 1, others), 1.0)


def lower_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """Return the lower confidence limit, with arguments as in :func:`upper_limit`."""
    return 1 - upper_limit(rows - np.asarray(hits, float), rows, error)
