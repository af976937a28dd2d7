"""Step times of all ranks in at most 512 blocks of consecutive steps, whatever the training's length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.shared.telemetry.records import COMPUTE, DATA, EXCHANGE, OPTIMIZER, REST

#: Seconds per step: the phases, the time the rank waited for a processor, and its thread's processor time from the
#: batch to the last gradient.
PER_STEP = (DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST, "processor_wait", "compute_cpu")
#: Amounts since the ranks last exchanged times: the loader's seconds by activity, the control group's counters (see
#: :class:`HostReading`), and seconds lost to lower GPU clocks.
PER_EXCHANGE = (
    *("store", "verification", "gathering", "copy", "augmentation"),
    *("throttled_seconds", "throttled_periods", "periods", "clocked_down"),
)
LOADER = PER_EXCHANGE[:5]
#: Minimum steps per block, and maximum number of blocks; beyond it, pairs of blocks are merged.
BLOCK_STEPS, BLOCKS = 16, 512


@dataclass
class StepBlock:
    """Sums over a block of consecutive steps.

    ``sums`` is float64 ``[ranks, PER_STEP]``. A rank's local work is its step without the exchange. The other fields
    sum one rank's seconds of every step.
    """

    steps: int
    sums: np.ndarray
    #: Seconds of local work of every step's slowest rank.
    slowest: float
    #: Seconds of local work without the wait for data, of every step's slowest rank by this measure.
    slowest_without_data: float
    #: Seconds of exchange of every step's rank that waited least for others.
    least_exchange: float

    def __add__(self, other: StepBlock) -> StepBlock:
        return StepBlock(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


class StepBlocks:
    """Accumulator of the step times of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.blocks: list[StepBlock] = []
        #: Sums of the ``PER_EXCHANGE`` amounts; float64 ``[ranks, PER_EXCHANGE]``.
        self.beside = np.zeros((ranks, len(PER_EXCHANGE)))
        self._least_steps = BLOCK_STEPS

    def add(self, times: np.ndarray, steps: list[int], beside: np.ndarray) -> None:
        """Add ``times`` ``[ranks, groups, PER_STEP]``, each group summed over as many steps as ``steps`` says."""
        self.beside += beside
        columns = {name: times[:, :, number] for number, name in enumerate(PER_STEP)}
        local = columns[DATA] + columns[COMPUTE] + columns[OPTIMIZER] + columns[REST]
        slowest, without = local.max(axis=0), (local - columns[DATA]).max(axis=0)
        least = columns[EXCHANGE].min(axis=0)
        for number, count in enumerate(steps):
            block = StepBlock(
                count,
                times[:, number].copy(),
                float(slowest[number]),
                float(without[number]),
                float(least[number]),
            )
            if self.blocks and self.blocks[-1].steps < self._least_steps:
                block = self.blocks.pop() + block
            self.blocks.append(block)
        if len(self.blocks) > BLOCKS:
            pairs = [self.blocks[at : at + 2] for at in range(0, len(self.blocks), 2)]
            self.blocks = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
            self._least_steps *= 2

    @property
    def total(self) -> StepBlock | None:
        """Sum of all blocks; None without steps."""
        if not self.blocks:
            return None
        whole = self.blocks[0]
        for block in self.blocks[1:]:
            whole = whole + block
        return whole
