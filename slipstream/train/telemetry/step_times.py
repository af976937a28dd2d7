"""This rank's times of its steps, which travel to all ranks with the exchange that they make anyway.

All ranks have finished the same steps when they exchange, so that they send equally much: each fills a place of its
own, and the maximum of all is what each of them has sent.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from slipstream.machine.limits import cpu_throttling
from slipstream.telemetry.records import COMPUTE, DATA, EXCHANGE, OPTIMIZER, REST, STEP_BOUNDS
from slipstream.telemetry.step_blocks import LOADER, PER_EXCHANGE, PER_STEP, StepBlocks

#: Groups of steps that one exchange has at most, of so many ranks together: what is sent stays small.
GROUPS, GROUPS_OF_ALL = 64, 2048


@dataclass
class LoaderTimes:
    """Seconds that the reading threads have spent, by what they did: waiting for blocks that are still in the store,
    verifying them, gathering rows, copying them to the device."""

    store: float = 0.0
    verification: float = 0.0
    gathering: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, see :data:`.PER_STEP`."""

    data: float
    compute: float
    exchange: float
    optimizer: float
    rest: float
    processor_wait: float = 0.0
    compute_cpu: float = 0.0


@dataclass
class StepTimes:
    """Of this ``rank`` of ``world``. All ranks' times are added up in ``blocks``."""

    rank: int
    world: int
    loader: LoaderTimes = field(default_factory=LoaderTimes)

    def __post_init__(self) -> None:
        self.blocks = StepBlocks(self.world)
        #: This rank's alone: seconds by phase, and for each of the bounds the steps that took at most so long.
        self.phases = dict.fromkeys((DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST), 0.0)
        self.within = [0] * len(STEP_BOUNDS)
        #: Steps and samples so far, and when the last step ended, on the clock of ``time.perf_counter``.
        self.steps = self.samples = 0
        self.last_step = 0.0
        self.durations: list[float] = []
        self._pending: list[StepTime] = []
        self._sent = self._beside()

    def add(self, time: StepTime) -> None:
        self._pending.append(time)
        for name in self.phases:
            self.phases[name] += getattr(time, name)
        self.steps, self.last_step = self.steps + 1, perf_counter()
        took = time.data + time.compute + time.exchange + time.optimizer + time.rest
        for number in range(bisect_left(STEP_BOUNDS, took), len(STEP_BOUNDS)):
            self.within[number] += 1

    def to_send(self) -> Tensor:
        """What this rank adds to the exchange: float64 ``[world, ...]``, zeros but for its own row; empty if no step
        was finished since the last one."""
        steps = self._groups()
        if not steps:
            return torch.zeros(0, dtype=torch.float64)
        rows = np.array([[getattr(time, name) for name in PER_STEP] for time in self._pending])
        ends = np.cumsum(steps)
        sums = np.add.reduceat(rows, [0, *ends[:-1].tolist()], axis=0)
        now = self._beside()
        row = np.concatenate([sums.ravel(), np.maximum(now - self._sent, 0.0)])
        self._sent = now
        sent = torch.zeros(self.world, len(row), dtype=torch.float64)
        sent[self.rank] = torch.from_numpy(row)
        return sent.flatten()

    def received(self, numbers: Sequence[float]) -> None:
        """The maximum of what all ranks sent."""
        steps = self._groups()
        self._pending.clear()
        if not steps:
            return
        table = np.array(numbers).reshape(self.world, -1)
        times = table[:, : -len(PER_EXCHANGE)].reshape(self.world, len(steps), len(PER_STEP))
        self.blocks.add(times, steps, table[:, -len(PER_EXCHANGE) :])

    def _groups(self) -> list[int]:
        """How many of the pending steps each group has."""
        pending = len(self._pending)
        groups = min(pending, max(1, min(GROUPS, GROUPS_OF_ALL // self.world)))
        return [pending * (number + 1) // groups - pending * number // groups for number in range(groups)]

    def _beside(self) -> np.ndarray:
        loader = [getattr(self.loader, name) for name in LOADER]
        quota = cpu_throttling()
        return np.array([*loader, quota.seconds, quota.throttled_periods, quota.periods])


def threads_of_pod() -> int:
    """Threads of this pod's ranks that run at a time."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(ranks * torch.get_num_threads(), len(os.sched_getaffinity(0)))
