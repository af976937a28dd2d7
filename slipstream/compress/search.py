"""Which candidate is tried next, and which is the best: pure functions of what was found.

Candidates are numbered from the least compressed; it is assumed that what loses too much at one loses too much at all
after it. Each one that is tried halves those that are left.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.artifacts.results.compression import CompressionTrial
from slipstream.compress.config import MOST_CANDIDATES, CompressionConfig


def shares_of(config: CompressionConfig) -> list[float]:
    """The shares of units that pruning may remove."""
    steps = MOST_CANDIDATES + 1
    return [config.share] if config.share else [step / steps for step in range(1, steps)]


def passes(tried: CompressionTrial, config: CompressionConfig) -> bool:
    return tried.answer == "passed" or (tried.answer == "can't tell" and config.when_in_doubt == "take")


def best(tried: Sequence[CompressionTrial], config: CompressionConfig) -> CompressionTrial | None:
    """The most compressed that loses little enough; None if none does."""
    return max((one for one in tried if passes(one, config)), key=lambda one: one.candidate, default=None)


def next_candidate(count: int, tried: Sequence[CompressionTrial], config: CompressionConfig) -> int:
    """The candidate of ``count`` that is trained next. If the search or its time is over, one that was trained already:
    the best, or else the last."""
    good = [one.candidate for one in tried if passes(one, config)]
    low = max(good, default=-1)
    high = min((one.candidate for one in tried if one.candidate > low and not passes(one, config)), default=count)
    spent = sum({one.candidate: one.seconds for one in tried}.values())
    if tried and (high - low <= 1 or spent >= 60 * config.minutes):
        return low if good else tried[-1].candidate
    return (low + high) // 2
