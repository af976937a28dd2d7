"""Sizes of batches, samples and counts under data.memory.

Sums, samples and pruned counts depend on these sizes. They follow from the setting and the table alone, never from the
free memory of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GIB = 1 << 30
#: Rows of the sample for distributions, if they fit.
SAMPLE_ROWS = 32_768
FEWEST_SAMPLED = 1024
#: Distinct texts of a column counted exactly, if they fit.
COUNTED = 100_000
FEWEST_COUNTED = 20_000
#: Bytes of a counted text with its dictionary entry, doubled because twice as many are held before rare ones are
#: dropped.
TEXT_BYTES = 2 * 150


@dataclass(frozen=True)
class Budget:
    """Parts of ``gib`` GiB that one process allots to data that grows with the table."""

    gib: float

    def batch_rows(self, columns: int) -> int:
        """Return the rows per batch; each is in memory several times, in different forms."""
        return int(np.clip(int(self.gib * GIB) // 64 // (8 * max(columns, 1)), 256, 1 << 16)) // 256 * 256

    @property
    def whole_group_bytes(self) -> int:
        """Largest size of a Parquet row group (decompressed) or Arrow batch that is read at once."""
        return int(self.gib * GIB) // 6

    def sample_rows(self, columns: int) -> int:
        return int(np.clip(int(self.gib * GIB) // 8 // (8 * max(columns, 1)), FEWEST_SAMPLED, SAMPLE_ROWS))

    def counted(self, text_columns: int) -> int:
        """Return how many distinct texts of each of ``text_columns`` columns are counted exactly."""
        return int(np.clip(int(self.gib * GIB) // 4 // (TEXT_BYTES * max(text_columns, 1)), FEWEST_COUNTED, COUNTED))
