"""How much is held at once under data.memory.

Sums, samples and pruned counts depend on these sizes, so they follow from the setting and the table alone: never from
what a machine happens to have free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GIB = 1 << 30
#: Rows of the sample from which distributions are judged, if they fit.
SAMPLE_ROWS = 32_768
FEWEST_SAMPLED = 1024
#: Distinct texts of a column that are counted exactly, if they fit.
COUNTED = 100_000
FEWEST_COUNTED = 20_000
#: What a counted text takes, with its place in a dictionary, and twice as many are held before rare ones are dropped.
TEXT_BYTES = 2 * 150


@dataclass(frozen=True)
class Budget:
    """The shares of ``gib`` GiB that one process gives to what grows with the table."""

    gib: float

    def batch_rows(self, columns: int) -> int:
        """Rows that are worked on at once: each of them lies in memory several times, in different shapes."""
        return int(np.clip(int(self.gib * GIB) // 64 // (8 * max(columns, 1)), 256, 1 << 16)) // 256 * 256

    @property
    def whole_group_bytes(self) -> int:
        """Row groups of Parquet (decompressed) and batches of Arrow up to this size are read at once."""
        return int(self.gib * GIB) // 6

    def sample_rows(self, columns: int) -> int:
        return int(np.clip(int(self.gib * GIB) // 8 // (8 * max(columns, 1)), FEWEST_SAMPLED, SAMPLE_ROWS))

    def counted(self, text_columns: int) -> int:
        """Distinct texts of each of so many columns that are counted exactly."""
        return int(np.clip(int(self.gib * GIB) // 4 // (TEXT_BYTES * max(text_columns, 1)), FEWEST_COUNTED, COUNTED))
