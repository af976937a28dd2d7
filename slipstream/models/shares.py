"""Exact confidence limits of a proportion of rows, by Clopper and Pearson.

"The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial", Biometrika 26, 1934.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def upper_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """Return the upper limit of the true proportion if ``hits`` of ``rows`` were drawn.

    It holds with probability 1 - ``error``.
    """
    from scipy.stats import beta

    hits = np.asarray(hits, float)
    others = np.maximum(rows - hits, 1e-9)  # The limit is 1 without others.
    return np.where(hits < rows, beta.ppf(1 - error, hits + 1, others), 1.0)


def lower_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """Return the lower limit of the true proportion."""
    return 1 - upper_limit(rows - np.asarray(hits, float), rows, error)
