"""Step times of this rank, sent with the ranks' exchange.

At an exchange all ranks have finished the same steps, so tensors have equal size. Every rank fills its own row, the
others with zeros; all-reducing with MAX gives every row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.shared.machine.limits import cpu_throttling
from slipstream.shared.telemetry.records import COMPUTE, DATA, EXCHANGE, OPTIMIZER, REST, STEP_BOUNDS
from slipstream.shared.telemetry.step_blocks import LOADER, PER_EXCHANGE, PER_STEP, StepBlocks

#: Maximum number of step groups per exchange, of one rank and of all ranks; it limits the bytes sent.
GROUPS, GROUPS_OF_ALL = 64, 2048


@dataclass
class LoaderTimes:
    """Seconds spent by the data loader's threads, by activity.

    They wait for blocks from a store (``store``), verify blocks, gather rows, copy them to the device and augment them.
    """

    store: float = 0.0
    verification: float = 0.0
    gathering: float = 0.0
    copy: float = 0.0
    augmentation: float = 0.0


class StepPhases(NamedTuple):
    """Seconds of one step by phase, in the order of :data:`.PER_STEP`."""

    data: float
    compute: float
    exchange: float
    optimizer: float
    rest: float
    processor_wait: float = 0.0
    compute_cpu: float = 0.0


@dataclass
class StepTimes:
    """Step times of ``rank``; on rank 0 ``blocks`` accumulates those of all ``world`` ranks."""

    rank: int
    world: int
    loader: LoaderTimes = field(default_factory=LoaderTimes)

    def __post_init__(self) -> None:
        self.blocks = StepBlocks(self.world)
        #: Total seconds of this rank by phase.
        self.phases = dict.fromkeys((DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST), 0.0)
        #: Number of this rank's steps that took at most each of :data:`.STEP_BOUNDS` seconds.
        self.within = [0] * len(STEP_BOUNDS)
        #: Number of this rank's steps until the last exchange, and of its samples.
        self.steps = self.samples = 0
        #: End of the last step, on the clock of ``time.perf_counter``; 0 before the first.
        self.last_step = 0.0
        #: Seconds that the pod's GPUs lost to lowered clock rates; set on the pod's first rank.
        self.clocked_down = 0.0
        #: Number of this rank's steps until now; shared with the sampler while totals are written.
        self.done = np.zeros(1, dtype="<i8")
        self._pending: list[StepPhases] = []
        self._sent = self._beside()

    def add(self, time: StepPhases) -> None:
        """Store a step's times without processing them, because work between steps runs with cold caches."""
        self._pending.append(time)
        self.done[0] += 1
        self.last_step = perf_counter()

    def to_send(self) -> Tensor:
        """Return this rank's contribution to the exchange: float64 ``[world, ...]``, flattened.

        Other ranks' rows are zero. The tensor is empty if no step has finished since the last exchange.
        """
        steps = self._groups()
        if not steps:
            return torch.zeros(0, dtype=torch.float64)
        rows = np.array(self._pending)
        ends = np.cumsum(steps)
        sums = np.add.reduceat(rows, [0, *ends[:-1].tolist()], axis=0)
        now = self._beside()
        row = np.concatenate([sums.ravel(), np.maximum(now - self._sent, 0.0)])
        self._sent = now
        sent = torch.zeros(self.world, len(row), dtype=torch.float64)
        sent[self.rank] = torch.from_numpy(row)
        return sent.flatten()

    def received(self, numbers: Sequence[float]) -> None:
        """Store the all-reduced contributions of all ranks."""
        steps = self._groups()
        if not steps:
            return
        self._count(np.array(self._pending)[:, : len(self.phases)])
        self._pending.clear()
        if self.rank:  # only rank 0 reports all ranks
            return
        table = np.array(numbers).reshape(self.world, -1)
        times = table[:, : -len(PER_EXCHANGE)].reshape(self.world, len(steps), len(PER_STEP))
        self.blocks.add(times, steps, table[:, -len(PER_EXCHANGE) :])

    def _count(self, phases: np.ndarray) -> None:
        """Add steps to this rank's totals; ``phases`` are seconds, ``[steps, phases]``."""
        for name, seconds in zip(self.phases, phases.sum(axis=0).tolist(), strict=True):
            self.phases[name] += seconds
        took = phases.sum(axis=1)
        self.within = [
            count + int((took <= bound).sum()) for bound, count in zip(STEP_BOUNDS, self.within, strict=True)
        ]
        self.steps += len(phases)

    def _groups(self) -> list[int]:
        """Return the number of pending steps in every group to send."""
        pending = len(self._pending)
        groups = min(pending, max(1, min(GROUPS, GROUPS_OF_ALL // self.world)))
        return [pending * (number + 1) // groups - pending * number // groups for number in range(groups)]

    def _beside(self) -> np.ndarray:
        loader = [getattr(self.loader, name) for name in LOADER]
        quota = cpu_throttling()
        return np.array([*loader, quota.seconds, quota.throttled_periods, quota.periods, self.clocked_down])


def threads_of_pod() -> int:
    """Return how many threads of this pod's ranks can run at the same time."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(ranks * torch.get_num_threads(), len(os.sched_getaffinity(0)))
