"""Predicted training step time for other numbers of ranks, from compute, gradients and all_reduce.

DistributedDataParallel fills buckets with gradients in reverse parameter order. It reduces a bucket once all its
gradients are computed, while the backward pass continues (Li et al., VLDB 2020). Buckets are reduced one after the
other. The step ends when the backward pass and the last bucket have ended and the optimiser has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.shared.interconnect.model.hockney import TimeEstimate

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
