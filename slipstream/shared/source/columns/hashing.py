"""Mixing of 64-bit numbers. Splits and row order depend on it, so it must never change.

The mixer is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import numpy as np


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Mix uint64 values of any shape; a bijection."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def row_keys(first: int, rows: int, seed: int) -> np.ndarray:
    """Return uniform uint64 ``[rows]`` for the row numbers from ``first`` on, determined by number and seed alone."""
    start = np.uint64((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64)
    return splitmix64(splitmix64(np.arange(first, first + rows, dtype=np.uint64)) ^ start)
