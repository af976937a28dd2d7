"""Collective decisions between steps: whether to stop, and how many steps until the next checkpoint.

All ranks get the same few numbers from one small collective, so they decide alike. The interval between checkpoints is
a number of steps, a time, or the optimum for a failure rate (:mod:`slipstream.shared.checkpoint_interval`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher, PreemptionNotice
from slipstream.pipeline.train.telemetry.step_times import StepTimes
from slipstream.shared.checkpoint_interval import best_seconds
from slipstream.shared.distributed.process_group import Peers

#: Target seconds between two exchanges, and so the longest delay of a reaction to a preemption notice. The schedule
#: converts it to steps by measured step times.
PERIOD_S = 1.0
#: Safety factor: a checkpoint is only started if the last one's duration times this factor, plus :data:`LEAVE_S`, fits
#: before the deadline.
SAVE_MARGIN = 1.5
#: Seconds to leave for the shutdown after the last checkpoint.
LEAVE_S = 2.0
#: Value for the seconds left if a notice has no deadline: more than any deadline, less than infinity.
ADVICE_S = 1e9


@dataclass(frozen=True)
class StopDecision:
    """Decision to stop: reason, and the fewest seconds left before a deadline on any rank."""

    why: str
    seconds_left: float

    def time_to_save(self, save_seconds: float) -> bool:
        """Return True if a checkpoint that takes ``save_seconds`` to publish fits before the deadline."""
        return self.seconds_left > SAVE_MARGIN * save_seconds + LEAVE_S


class RankTimings(NamedTuple):
    """Timings of one rank in seconds (0 if unknown); all-reduced with MAX."""

    #: Duration of one step.
    step_s: float = 0.0
    #: Stall of the step loop from a save.
    stall_s: float = 0.0
    #: Time from a snapshot to its publication.
    publish_s: float = 0.0
    #: Age of the oldest unsaved snapshot.
    unsaved_s: float = 0.0
    #: Nonzero if a save is in progress.
    saving: float = 0.0


UNKNOWN = RankTimings()


@dataclass(frozen=True)
class GroupState:
    """Result of an exchange, equal on all ranks.

    ``stop`` is None to continue. ``advised`` is True if some rank has a preemption notice without a deadline: a reason
    to save soon, but not to stop.
    """

    stop: StopDecision | None
    advised: bool
    slowest: RankTimings


class ExchangeSchedule:
    """Schedule of exchanges by a count of steps or evaluation batches, computed alike on all ranks."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._next = 1

    def due(self, count: int) -> bool:
        """Return True if all ranks must exchange at ``count``."""
        return count >= self._next

    def exchanged(self, count: int, each_s: float) -> None:
        """Record an exchange at ``count``; ``each_s`` is the agreed duration of one count in seconds (0 if unknown)."""
        # At most twice the last distance, since steps may become slower than the measured ones.
        furthest = 1 if self._last is None else max(1, 2 * (count - self._last))
        self._last, self._next = count, count + (min(furthest, max(1, round(PERIOD_S / each_s))) if each_s else 1)

    def exchange_by(self, count: int) -> None:
        """Schedule an exchange at ``count`` at the latest; all ranks must call this."""
        self._next = min(self._next, count)


class Consensus:
    """Exchange between ``peers``, a process group that nothing else uses at that time."""

    def __init__(self, watcher: NoticeWatcher, peers: Peers) -> None:
        self._watcher = watcher
        self._peers = peers

    def exchange(self, measured: RankTimings = UNKNOWN, times: StepTimes | None = None) -> GroupState:
        """Exchange preemption notices, measurements and step ``times``; all ranks must call this."""
        figures = torch.tensor([-seconds_left(self._watcher.notice), *measured], dtype=torch.float64)
        if times is not None:
            figures = torch.cat([figures, times.to_send()])
        if self._peers.group is not None:
            dist.all_reduce(figures, dist.ReduceOp.MAX, group=self._peers.group)
        negative_left, *numbers = figures.tolist()
        slowest = numbers[: len(measured)]
        if times is not None:
            times.received(numbers[len(measured) :])
        stop = StopDecision(self._reason(), -negative_left) if negative_left > -ADVICE_S else None
        return GroupState(stop, negative_left == -ADVICE_S, RankTimings(*slowest))

    @property
    def leads(self) -> bool:
        """True on rank 0, which logs for all ranks."""
        return self._peers.rank == 0

    def local_stop(self) -> StopDecision | None:
        """Return the stop that this rank's own preemption notice requires, without an exchange.

        None without a notice, or without a deadline.
        """
        notice = self._watcher.notice
        if notice is None or notice.deadline is None:
            return None
        return StopDecision(f"{notice.source}: {notice.what}", seconds_left(notice))

    def _reason(self) -> str:
        stop = self.local_stop()
        reasons = self._peers.gather(stop.why if stop else "")
        rank = next(rank for rank, why in enumerate(reasons) if why)
        return f"rank {rank}: {reasons[rank]}"


def seconds_left(notice: PreemptionNotice | None) -> float:
    """Return the seconds until a notice's deadline.

    Infinity without a notice; :data:`ADVICE_S` for a notice without a deadline.
    """
    if notice is None:
        return math.inf
    return ADVICE_S if notice.deadline is None else notice.deadline - time.monotonic()


@dataclass(frozen=True)
class CheckpointInterval:
    """Checkpoint interval, by the one field that is not 0."""

    steps: int = 0
    seconds: float = 0.0
    #: Mean seconds between failures of the whole job: the mean of one machine, divided by the number of machines.
    mean_time_between_failures_s: float = 0.0

    @classmethod
    def configured(cls, training: TrainingConfig, rows: int) -> CheckpointInterval:
        """Return the interval of the settings; by default one epoch of ``rows`` rows."""
        if training.checkpoint_seconds or training.mean_time_between_failures:
            return cls(0, training.checkpoint_seconds, training.mean_time_between_failures)
        return cls(steps=training.checkpoint_every or math.ceil(rows / training.rows_per_step))

    def between(self, measured: RankTimings) -> int:
        """Return the number of steps from one checkpoint to the next, given measurements agreed by all ranks."""
        if self.steps:
            return self.steps
        if measured.step_s <= 0:
            return 1
        if self.seconds:
            return max(1, round(self.seconds / measured.step_s))
        best = best_seconds(measured.stall_s, measured.publish_s, self.mean_time_between_failures_s)
        return max(1, math.ceil(best / measured.step_s))
