"""Sizes of batches, samples and counts under the setting ``data.memory``.

They decide sums, samples and pruned counts, and depend only on the setting and the table, so results are equal on all
machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GIB = 1 << 30
#: Number of rows of the sample for distributions, if they fit.
SAMPLE_ROWS = 32_768
FEWEST_SAMPLED = 1024
#: Number of distinct texts of a column that are counted exactly, if they fit.
COUNTED = 100_000
FEWEST_COUNTED = 20_000
#: Bytes per counted text with its dictionary entry, doubled because twice as many texts are held before rare ones are
#: dropped.
TEXT_BYTES = 2 * 150


@dataclass(frozen=True)
class MemoryBudget:
    """Division of ``gib`` GiB, the memory of one process for data that grows with the table."""

    gib: float

    def batch_rows(self, columns: int) -> int:
        """Return the rows per batch, a multiple of 256, with room for several forms of a batch in memory."""
        return int(np.clip(int(self.gib * GIB) // 64 // (8 * max(columns, 1)), 256, 1 << 16)) // 256 * 256

    @property
    def whole_group_bytes(self) -> int:
        """Largest size in bytes of a Parquet row group (decompressed) or Arrow batch that is read at once."""
        return int(self.gib * GIB) // 6

    def sample_rows(self, columns: int) -> int:
        return int(np.clip(int(self.gib * GIB) // 8 // (8 * max(columns, 1)), FEWEST_SAMPLED, SAMPLE_ROWS))

    def counted(self, text_columns: int) -> int:
        """Return how many distinct texts per column are counted exactly, for ``text_columns`` text columns."""
        return int(np.clip(int(self.gib * GIB) // 4 // (TEXT_BYTES * max(text_columns, 1)), FEWEST_COUNTED, COUNTED))
