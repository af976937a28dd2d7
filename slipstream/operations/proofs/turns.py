"""Alternating runs (turns) of contenders, so that changes in the machine's load affect all of them equally."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from scipy.stats import binom

Figures = dict[str, float]


def in_turns(contenders: Mapping[str, Callable[[], Figures]], turns: int) -> dict[str, list[Figures]]:
    """Run every contender once per turn and return its figures by turn.

    The order is random, so that no contender always follows the same one.
    """
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for _ in range(turns):
        for name in draw.sample(list(contenders), len(contenders)):
            found[name].append(contenders[name]())
    return found


def medians(runs: Sequence[Mapping[str, float]]) -> Figures:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def settled(runs: Sequence[Mapping[str, float]]) -> Figures:
    """Return the medians of all runs but the first, which warms caches and counts only if alone."""
    return medians(runs[1:] or runs)


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the bounds of its distribution-free 95 % interval."""
    ordered = sorted(values)
    outside = int(binom.ppf(0.025, len(ordered), 0.5))
    low, high = ordered[max(0, outside - 1)], ordered[min(len(ordered) - 1, len(ordered) - outside)]
    return statistics.median(ordered), low, high
