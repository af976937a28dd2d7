"""Limits of a share of rows: Clopper and Pearson's exact ones ("The Use of Confidence or Fiducial Limits Illustrated in
the Case of the Binomial", Biometrika 26, 1934)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def upper_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """What the true share of rows does not exceed, with probability 1 - ``error``, if ``hits`` of ``rows`` were
    drawn."""
    from scipy.stats import beta

    hits = np.asarray(hits, float)
    others = np.maximum(rows - hits, 1e-9)  # where there are none the limit is 1
    return np.where(hits < rows, beta.ppf(1 - error, hits + 1, others), 1.0)


def lower_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """What the true share is not below."""
    return 1 - upper_limit(rows - np.asarray(hits, float), rows, error)
