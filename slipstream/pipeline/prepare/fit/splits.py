"""Assignment of rows to splits by a stable hash of id or content, so that adding rows never moves existing rows."""

from __future__ import annotations

import numpy as np

from slipstream.shared.source.columns.identity import splitmix64
from slipstream.shared.source.config import SplitConfig

#: Times in seconds since 1970 at which the validation and test splits start.
Cuts = tuple[float, float]

TRAIN, VALIDATION, TEST = 0, 1, 2


def assign_splits(hashes: np.ndarray, config: SplitConfig) -> np.ndarray:
    """Return the split of every row from its uint64 hash; equal hashes get the same split.

    The result is uint8 ``[rows]``, an index into ``SPLITS``.
    """
    seed = splitmix64(np.array([config.seed], np.uint64))
    share = (splitmix64(hashes ^ seed) >> np.uint64(11)) * 2.0**-53
    held_out = np.where(share < config.test, TEST, VALIDATION)
    return np.where(share < config.test + config.validation, held_out, TRAIN).astype(np.uint8)


def assign_by_time(seconds: np.ndarray, cuts: Cuts) -> np.ndarray:
    """Return the split (uint8 ``[rows]``) of float64 times: training before the first cut, test from the second."""
    return np.searchsorted(cuts, seconds, side="right").astype(np.uint8)


def find_cuts(seconds: np.ndarray, config: SplitConfig) -> Cuts:
    """Return the cuts that hold out the configured shares of the latest rows; equal times get the same split."""
    shares = [1 - config.test - config.validation, 1 - config.test]
    validation, test = np.quantile(seconds, shares, method="higher")
    return float(validation), float(test)
