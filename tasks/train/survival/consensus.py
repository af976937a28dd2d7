"""Deciding together, between steps: whether to stop, and how many steps to the next checkpoint and the next question.

One collective of a few bytes. All ranks see the same numbers, so all come to the same conclusions.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tasks.distributed.peers import Peers
from tasks.train.survival.notices import Notice, Watcher

#: Seconds between questions; a notice waits at most that long. The number of steps this takes is measured.
PERIOD_S = 1.0
#: Of what a save took before, how much longer the next may take, and what is to be left over.
SAVE_MARGIN = 1.5
LEAVE_S = 2.0
#: Stands for the time that a mere advice leaves: more than any deadline, less than none at all.
ADVICE_S = 1e9


@dataclass(frozen=True)
class Stop:
    """An agreed end: why, and the seconds that the rank with the least time has left."""

    why: str
    seconds_left: float

    def time_to_save(self, save_seconds: float) -> bool:
        """Whether a checkpoint that takes about ``save_seconds`` to be published is worth beginning."""
        return self.seconds_left > SAVE_MARGIN * save_seconds + LEAVE_S


@dataclass(frozen=True)
class Agreed:
    """What the ranks know together at one step: the slowest rank's figures.

    ``advised`` says that some machine will probably go, without a time: a reason to save soon, not to leave.
    """

    stop: Stop | None
    advised: bool
    step_s: float
    stall_s: float
    publish_s: float


class Pace:
    """When to ask: at counts (of steps, of an evaluation's batches) that all ranks know beforehand."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._next = 1

    def due(self, count: int) -> bool:
        """Whether all ranks ask at this count."""
        return count >= self._next

    def asked(self, count: int, each_s: float) -> None:
        """They asked, and agreed that one more takes ``each_s`` seconds; 0 while unknown."""
        # Never more than twice as far as the last time: steps may become slower than those that were measured.
        furthest = 1 if self._last is None else max(1, 2 * (count - self._last))
        self._last, self._next = count, count + (min(furthest, max(1, round(PERIOD_S / each_s))) if each_s else 1)

    def soon(self, count: int) -> None:
        """Ask at ``count`` at the latest; all ranks must say so."""
        self._next = min(self._next, count)


class Agreement:
    """The question itself: a collective on a process group of its own, so that it meets no other."""

    def __init__(self, watcher: Watcher, timeout: timedelta = timedelta(minutes=10)) -> None:
        self._watcher = watcher
        self._peers = Peers.meet(timeout)

    def ask(self, *, step_s: float = 0.0, stall_s: float = 0.0, publish_s: float = 0.0) -> Agreed:
        """Hold the collective; all ranks must. The figures are what this rank measured, 0 while unknown: the time of a
        step, what a save costs the loop, and what it takes until it is published."""
        mine = [-seconds_left(self._watcher.notice), step_s, stall_s, publish_s]
        worst, step_s, stall_s, publish_s = self._largest(mine)
        stop = Stop(self._why(), -worst) if worst > -ADVICE_S else None
        return Agreed(stop, worst == -ADVICE_S, step_s, stall_s, publish_s)

    def alone(self) -> Stop | None:
        """What this rank knows by itself, without asking: its own machine's end."""
        notice = self._watcher.notice
        if notice is None or notice.deadline is None:
            return None
        return Stop(f"{notice.source}: {notice.what}", seconds_left(notice))

    def _largest(self, figures: list[float]) -> list[float]:
        tensor = torch.tensor(figures, dtype=torch.float64)
        if self._peers.group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._peers.group)
        return tensor.tolist()

    def _why(self) -> str:
        notice = self._watcher.notice
        certain = notice is not None and notice.deadline is not None
        said = self._peers.gather(f"{notice.source}: {notice.what}" if notice and certain else "")
        rank = next(rank for rank, why in enumerate(said) if why)
        return f"rank {rank}: {said[rank]}"

    def close(self) -> None:
        if self._peers.group is not None:
            dist.destroy_process_group(self._peers.group)


def seconds_left(notice: Notice | None) -> float:
    """Infinite without a notice; :data:`ADVICE_S` for one without a time."""
    if notice is None:
        return math.inf
    return ADVICE_S if notice.deadline is None else notice.deadline - time.monotonic()
