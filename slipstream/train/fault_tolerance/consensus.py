"""Decisions that all ranks take together between steps: whether to stop, and how many steps until the next checkpoint.

The ranks exchange a few numbers in one small collective. All of them get the same numbers, and therefore decide alike.

The interval between checkpoints is a number of steps, a time, or the optimum for a failure rate
(:mod:`slipstream.checkpoint_interval`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from slipstream.checkpoint_interval import best_seconds
from slipstream.distributed.process_group import Peers
from slipstream.train.fault_tolerance.notices import Notice, Watcher
from slipstream.train.telemetry.step_times import StepTimes

#: Seconds between two exchanges, and so the longest that a notice waits. The number of steps that take so long is
#: computed from measured step times.
PERIOD_S = 1.0
#: A checkpoint is only begun if this many times the duration of the last one fits before the deadline, with this many
#: seconds to spare.
SAVE_MARGIN = 1.5
LEAVE_S = 2.0
#: Stands for the seconds left after a notice without a deadline: more than any deadline, less than infinity.
ADVICE_S = 1e9


@dataclass(frozen=True)
class Stop:
    """The decision to stop: the reason, and the seconds left on the rank that has the least."""

    why: str
    seconds_left: float

    def time_to_save(self, save_seconds: float) -> bool:
        """Whether a checkpoint that takes about ``save_seconds`` to publish can be finished before the deadline."""
        return self.seconds_left > SAVE_MARGIN * save_seconds + LEAVE_S


class Measured(NamedTuple):
    """What a rank measured, in seconds, 0 while unknown; of all ranks the slowest's."""

    #: Of one step.
    step_s: float = 0.0
    #: Of the stall that a save causes in the step loop.
    stall_s: float = 0.0
    #: From a snapshot to its publication.
    publish_s: float = 0.0
    #: Since the first snapshot was taken that is not saved.
    unsaved_s: float = 0.0
    #: Not 0 if a save is in progress.
    saving: float = 0.0


UNKNOWN = Measured()


@dataclass(frozen=True)
class GroupState:
    """The result of an exchange, equal on all ranks. ``advised`` says that a rank has a notice without a deadline: a
    reason to save soon, but not to stop."""

    stop: Stop | None
    advised: bool
    slowest: Measured


class ExchangeSchedule:
    """When to exchange: at counts (of steps, or of an evaluation's batches) that all ranks compute alike."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._next = 1

    def due(self, count: int) -> bool:
        """Whether all ranks exchange at this count."""
        return count >= self._next

    def exchanged(self, count: int, each_s: float) -> None:
        """The ranks exchanged at ``count`` and agreed that one more takes ``each_s`` seconds; 0 while unknown."""
        # At most twice the last distance, since steps may become slower than those that were measured.
        furthest = 1 if self._last is None else max(1, 2 * (count - self._last))
        self._last, self._next = count, count + (min(furthest, max(1, round(PERIOD_S / each_s))) if each_s else 1)

    def exchange_by(self, count: int) -> None:
        """Exchange at ``count`` at the latest; all ranks must call this."""
        self._next = min(self._next, count)


class Consensus:
    """The exchange itself, between ``peers``, on whose group nothing else is in progress meanwhile."""

    def __init__(self, watcher: Watcher, peers: Peers) -> None:
        self._watcher = watcher
        self._peers = peers

    def exchange(self, measured: Measured = UNKNOWN, times: StepTimes | None = None) -> GroupState:
        """Exchange notices and what the ranks measured, the ``times`` of their steps with it; all ranks must call
        this."""
        figures = torch.tensor([-seconds_left(self._watcher.notice), *measured], dtype=torch.float64)
        if times is not None:
            figures = torch.cat([figures, times.to_send()])
        if self._peers.group is not None:
            dist.all_reduce(figures, dist.ReduceOp.MAX, group=self._peers.group)
        negative_left, *numbers = figures.tolist()
        slowest = numbers[: len(measured)]
        if times is not None:
            times.received(numbers[len(measured) :])
        stop = Stop(self._reason(), -negative_left) if negative_left > -ADVICE_S else None
        return GroupState(stop, negative_left == -ADVICE_S, Measured(*slowest))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self._peers.rank == 0

    def local_stop(self) -> Stop | None:
        """The stop that this rank's own notice asks for, without an exchange."""
        notice = self._watcher.notice
        if notice is None or notice.deadline is None:
            return None
        return Stop(f"{notice.source}: {notice.what}", seconds_left(notice))

    def _reason(self) -> str:
        stop = self.local_stop()
        reasons = self._peers.gather(stop.why if stop else "")
        rank = next(rank for rank, why in enumerate(reasons) if why)
        return f"rank {rank}: {reasons[rank]}"


def seconds_left(notice: Notice | None) -> float:
    """Infinity without a notice; :data:`ADVICE_S` for a notice without a deadline."""
    if notice is None:
        return math.inf
    return ADVICE_S if notice.deadline is None else notice.deadline - time.monotonic()


@dataclass(frozen=True)
class Interval:
    """Exactly one field is set, the others are 0."""

    steps: int = 0
    seconds: float = 0.0
    #: Seconds between failures of the whole job: of one machine, divided by the number of machines.
    mean_time_between_failures_s: float = 0.0

    def between(self, measured: Measured) -> int:
        """Steps from one checkpoint to the next, by what the ranks agreed on."""
        if self.steps:
            return self.steps
        if measured.step_s <= 0:
            return 1
        if self.seconds:
            return max(1, round(self.seconds / measured.step_s))
        best = best_seconds(measured.stall_s, measured.publish_s, self.mean_time_between_failures_s)
        return max(1, math.ceil(best / measured.step_s))
