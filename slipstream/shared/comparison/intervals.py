"""Confidence intervals of timings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
#: Minimum number of calls above a percentile that is reported.
BEYOND = 10
LEVEL = 0.95


def calls_needed(share: float) -> int:
    """Return the number of calls needed to report a percentile, with ``BEYOND`` of them above it.

    20 for p50, 100 for p90, 1,000 for p99.
    """
    return round(BEYOND / (1 - share))


def percentile_estimate(sorted_ms: np.ndarray, share: float) -> Estimate | None:
    """Return a percentile of sorted latencies with its 95 % interval; None for too few calls.

    The interval lies between order statistics whose ranks come from the binomial distribution (David and Nagaraja,
    "Order Statistics", 2003, section 7.1). It assumes independent calls.
    """
    from scipy.stats import binom

    calls = len(sorted_ms)
    if calls < calls_needed(share):
        return None
    below, above = binom.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], calls, share).astype(int)
    low, high = sorted_ms[np.clip([below - 1, above], 0, calls - 1)]
    return Estimate(float(np.quantile(sorted_ms, share)), float(low), float(high))


def speedup_estimate(logarithms: Sequence[np.ndarray]) -> Estimate:
    """Return the speedup from the log ratios of paired turns, one array per load of the model.

    Two loads of one file differ by some percent for their lifetime, so rounds with the same load are not independent.
    Each load gives one value, the median of its rounds. Student's distribution of the values' mean gives a 95 % limit
    on each side.
    """
    from scipy.stats import t

    medians = np.array([np.median(each) for each in logarithms])
    mean, loads = float(medians.mean()), len(medians)
    half = float(t.ppf(LEVEL, loads - 1) * medians.std(ddof=1) / np.sqrt(loads)) if loads > 1 else np.inf
    return Estimate(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(min(mean + half, 50.0))))


def latency_figures(nanoseconds: np.ndarray, speedup: Estimate | None) -> LatencyFigures:
    """Return latency figures of a variant at one batch size from the times of all calls."""
    milliseconds = np.sort(nanoseconds) / 1e6
    quoted = {name: percentile_estimate(milliseconds, share) for name, share in PERCENTILES.items()}
    mean = float(milliseconds.mean())
    variation = float(milliseconds.std()) / mean
    return LatencyFigures(**quoted, calls=len(milliseconds), speedup=speedup, mean=mean, variation=variation)
