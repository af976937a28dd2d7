"""Which split a row belongs to: a stable hash of its id or its content, so that adding rows never moves old ones."""

from __future__ import annotations

import numpy as np

from slipstream.source.columns.hashing import splitmix64
from slipstream.source.config import SplitConfig

#: Seconds since 1970 from which rows validate, and from which they test.
Cuts = tuple[float, float]

TRAIN, VALIDATION, TEST = 0, 1, 2


def assign(hashes: np.ndarray, config: SplitConfig) -> np.ndarray:
    """uint8 ``[rows]``, an index into ``prepared.SPLITS``, from uint64 hashes. Equal hashes share a split."""
    seed = splitmix64(np.array([config.seed], np.uint64))
    share = (splitmix64(hashes ^ seed) >> np.uint64(11)) * 2.0**-53
    held_out = np.where(share < config.test, TEST, VALIDATION)
    return np.where(share < config.test + config.validation, held_out, TRAIN).astype(np.uint8)


def assign_by_time(seconds: np.ndarray, cuts: Cuts) -> np.ndarray:
    """uint8 ``[rows]`` from times (float64): before the first cut to train, from the second on to test."""
    return np.searchsorted(cuts, seconds, side="right").astype(np.uint8)


def find_cuts(seconds: np.ndarray, config: SplitConfig) -> Cuts:
    """The cuts that hold out the configured shares of the latest rows; rows of one time stay together."""
    shares = [1 - config.test - config.validation, 1 - config.test]
    validation, test = np.quantile(seconds, shares, method="higher")
    return float(validation), float(test)
