"""Message time by size: a latency and a time per byte (Hockney 1994), piecewise linear, with error bars.

Caches and protocols change with the size, so the time per byte may change at some of the measured sizes;
cross-validation over sizes selects how many.

Sizes are weighted by their precision. Small messages also wait for processors: their medians may differ by a factor of
4 between launches in which large messages agree to 0.1 %. Over a link of 200 Mbit/s, a prediction of 4 MB from 16 KB to
1 MB had a root mean square error of 4.4 % with equal weights, and of 0.4 % with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from scipy.optimize import nnls
from scipy.stats import t as student

#: While the error on held-out sizes is above ``GOOD_ENOUGH``, a break is added if it multiplies this error by less than
#: ``WORTH_A_PIECE``.
GOOD_ENOUGH, WORTH_A_PIECE = 0.02, 0.8
#: Lower bound for the relative precision of a size.
BEST_KNOWN = 0.01
MOST_BREAKS = 2
CONFIDENCE = 0.95


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds, with the 95 % interval expected for the median of another launch."""

    seconds: float
    low: float
    high: float

    def times(self, factor: float) -> TimeEstimate:
        return TimeEstimate(self.seconds * factor, self.low * factor, self.high * factor)

    @property
    def milliseconds(self) -> str:
        return f"{self.seconds * 1e3:.3g} ms ({self.low * 1e3:.3g} to {self.high * 1e3:.3g})"

    def contains(self, seconds: float) -> bool:
        return self.low <= seconds <= self.high


@dataclass(frozen=True)
class Hockney:
    """Latency, and time per byte between breaks, fitted to every launch."""

    #: Sizes in bytes at which the time per byte changes, ascending; empty for a straight line.
    breaks: tuple[float, ...]
    #: For each launch: latency in seconds, then seconds per byte between breaks.
    launches: tuple[tuple[float, ...], ...]
    #: Root mean square of the relative errors of held-out sizes.
    error: float
    #: Smallest and largest fitted size in bytes.
    sizes: tuple[float, float]

    @property
    def latency(self) -> float:
        """Seconds of an empty message: the median over launches."""
        return float(np.median([launch[0] for launch in self.launches]))

    @property
    def bandwidth(self) -> float:
        """Bytes per second beyond the last break: the median over launches."""
        return 1 / max(float(np.median([launch[-1] for launch in self.launches])), 1e-18)

    def seconds(self, size: float) -> TimeEstimate:
        """Return the estimate for ``size`` bytes.

        Its interval combines the spread between launches with the error on held-out sizes.
        """
        row = regressors([size], self.breaks)[0]
        logs = np.log([max(float(row @ launch), 1e-12) for launch in self.launches])
        count = len(logs)
        spread = float(logs.std(ddof=1)) if count > 1 else 0.0
        half = student.ppf((1 + CONFIDENCE) / 2, max(1, count - 1)) * spread * (1 + 1 / count) ** 0.5
        half = float(np.hypot(half, 2 * self.error))
        middle = float(logs.mean())
        return TimeEstimate(float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half)))


def regressors(sizes: Sequence[float], breaks: Sequence[float]) -> np.ndarray:
    """Return the regressors of every size: 1, and its bytes between breaks; float64 ``[sizes, 2 + breaks]``."""
    x = np.asarray(sizes, dtype=np.float64)[:, None]
    starts, ends = np.array([0.0, *breaks]), np.array([*breaks, np.inf])
    return np.hstack([np.ones_like(x), np.clip(np.minimum(x, ends) - starts, 0, None)])


def weights_of(launches: Sequence[Sequence[float]]) -> np.ndarray:
    """Return every size's weight: 1 / standard deviation of the logarithms of its seconds over launches."""
    spreads = [np.log(seconds).std(ddof=1) if len(seconds) > 1 else 0.0 for seconds in launches]
    return 1 / np.maximum(BEST_KNOWN, spreads)


def least_squares(
    sizes: Sequence[float], seconds: Sequence[float], weights: np.ndarray, breaks: Sequence[float]
) -> np.ndarray:
    """Return the non-negative latency and seconds per byte of the weighted fit to relative errors."""
    relative = regressors(sizes, breaks) / np.asarray(seconds)[:, None]
    return nnls(relative * weights[:, None], weights)[0]


def left_out_error(
    sizes: Sequence[float], seconds: Sequence[float], weights: np.ndarray, breaks: Sequence[float]
) -> float:
    """Return the weighted root mean square of the relative errors in leave-one-out validation over sizes."""
    errors = []
    for out in range(len(sizes)):
        rest = [i for i in range(len(sizes)) if i != out]
        fitted = least_squares([sizes[i] for i in rest], [seconds[i] for i in rest], weights[rest], breaks)
        errors.append(float(regressors([sizes[out]], breaks)[0] @ fitted) / seconds[out] - 1)
    return float(np.sqrt(np.average(np.square(errors), weights=np.square(weights))))


def fit_hockney(points: Mapping[float, Sequence[float]]) -> Hockney:
    """Fit the seconds of every launch by size; the k-th seconds of all sizes belong to launch k.

    Raises ``ValueError`` for fewer than 3 sizes, or no launch.
    """
    sizes = sorted(points)
    count = min((len(points[size]) for size in sizes), default=0)
    if len(sizes) < 3 or count < 1:
        raise ValueError(f"a latency and a bandwidth are fitted to 3 sizes or more, not to {len(sizes)}")
    weights = weights_of([points[size][:count] for size in sizes])
    typical = [float(np.exp(np.mean(np.log(points[size])))) for size in sizes]
    best: tuple[float, ...] = ()
    error = left_out_error(sizes, typical, weights, best)
    for pieces in range(1, MOST_BREAKS + 1):
        # A bandwidth needs two sizes, or it would be that of a single point.
        inner = range(1, len(sizes) - 2)
        allowed = [c for c in combinations(inner, pieces) if all(b - a >= 2 for a, b in pairwise(c))]
        found = [(left_out_error(sizes, typical, weights, [sizes[i] for i in c]), c) for c in allowed]
        if found and error > GOOD_ENOUGH and min(found)[0] < WORTH_A_PIECE * error:
            error, chosen = min(found)
            best = tuple(sizes[i] for i in chosen)
    launches = [
        least_squares(sizes, [points[size][launch] for size in sizes], weights, best) for launch in range(count)
    ]
    return Hockney(best, tuple(tuple(map(float, each)) for each in launches), error, (sizes[0], sizes[-1]))


# DistributedDataParallel fills buckets with gradients in reverse parameter order. It reduces a bucket once all its
# gradients are computed, while the backward pass continues (Li et al., VLDB 2020). Buckets are reduced one after the
# other. The step ends when the backward pass and the last bucket have ended and the optimiser has run.
#: torch.distributed's bucket sizes in bytes; the first is smaller, so that communication starts early.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True)
class Compute:
    """Seconds of one step on a single rank without communication, and bytes per gradient."""

    forward: float
    backward: float
    optimizer: float
    #: Bytes of every gradient, in parameter order.
    gradients: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class PredictedStepTime:
    """Seconds of a step, and the fraction that is computation: 1 for perfect weak scaling."""

    step: TimeEstimate
    efficiency: TimeEstimate


def bucket_sizes(gradients: Sequence[int], first: int = FIRST_BUCKET, cap: int = BUCKET) -> list[int]:
    """Return the bytes of every bucket, in order of reduction."""
    buckets: list[int] = []
    filling = 0
    for size in reversed(gradients):
        filling += size
        if filling >= (cap if buckets else first):
            buckets.append(filling)
            filling = 0
    return [*buckets, filling] if filling else buckets


def step_seconds(compute: Compute, buckets: Sequence[int], all_reduce: Callable[[int], float]) -> float:
    """Return the seconds of a step.

    Gradients are assumed to become ready evenly over the backward pass, by their bytes.
    """
    total, ready, ended = sum(buckets), 0, 0.0
    for size in buckets:
        ready += size
        appears = compute.forward + compute.backward * ready / total
        ended = max(ended, appears) + all_reduce(size)
    return max(ended, compute.forward + compute.backward) + compute.optimizer


def predict_step_time(compute: Compute, all_reduce: Callable[[int], TimeEstimate]) -> PredictedStepTime:
    """Return the step time with DDP's buckets.

    Its interval follows from the intervals of ``all_reduce(bytes)``.
    """
    buckets = bucket_sizes(compute.gradients)
    step = TimeEstimate(
        step_seconds(compute, buckets, lambda size: all_reduce(size).seconds),
        step_seconds(compute, buckets, lambda size: all_reduce(size).low),
        step_seconds(compute, buckets, lambda size: all_reduce(size).high),
    )
    alone = compute.seconds
    return PredictedStepTime(step, TimeEstimate(alone / step.seconds, alone / step.high, alone / step.low))
