"""Contenders take turns, so that a change in the machine's load meets all of them alike."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from scipy.stats import binom

Figures = dict[str, float]


def in_turns(contenders: Mapping[str, Callable[[], Figures]], turns: int) -> dict[str, list[Figures]]:
    """What each contender gives in each of the ``turns``.

    Their order is drawn anew for each turn: one that always followed the same other would pay for what that leaves,
    such as memory that the host of a virtual machine has taken back.
    """
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for _ in range(turns):
        for name in draw.sample(list(contenders), len(contenders)):
            found[name].append(contenders[name]())
    return found


def medians(runs: Sequence[Mapping[str, float]]) -> Figures:
    """The median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def settled(runs: Sequence[Mapping[str, float]]) -> Figures:
    """The medians without the first turn, which warms caches, where there are others."""
    return medians(runs[1:] or runs)


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of an interval that holds it in 95 of 100 cases, whatever the distribution."""
    ordered = sorted(values)
    outside = int(binom.ppf(0.025, len(ordered), 0.5))
    low, high = ordered[max(0, outside - 1)], ordered[min(len(ordered) - 1, len(ordered) - outside)]
    return statistics.median(ordered), low, high
