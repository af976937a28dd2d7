"""Possible micro-batch counts of a rank's batch."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.pipeline.train.loop.step import micro_batches, padded_rows
from slipstream.pipeline.train.parallel.config import ParallelConfig


def legal_numbers(share: int, parallel: ParallelConfig, least_rows: int = 1) -> list[int]:
    """Return the possible counts for a batch of ``share`` rows, one per micro-batch size.

    Every micro-batch has at least ``least_rows`` rows. Counts start from the smallest that the layout allows, and are
    multiples of the pipeline's size. If the batch is too small, only that smallest count is returned.
    """
    rounds = parallel.pipeline
    fewest = rounds * parallel.stages_per_rank
    most = max(share // least_rows, fewest)
    numbers, rows = list[int](), 0
    for number in range(fewest, most + 1, rounds):
        each = -(-share // number)
        pieces = len(micro_batches(padded_rows(share, number), number))
        # There may be fewer slices than requested, and an interleaved schedule takes whole rounds only.
        whole = pieces >= fewest and (parallel.schedule != "interleaved" or pieces % rounds == 0)
        if each != rows and whole:
            numbers.append(number)
            rows = each
    return numbers or [fewest]


def at_least_doubled(number: int, legal: Sequence[int]) -> int:
    """Return the first of the sorted ``legal`` counts that is at least twice ``number``.

    Without such a count, returns the largest if it exceeds ``number``, else 0.
    """
    more = [other for other in legal if other > number]
    return next((other for other in more if other >= 2 * number), more[-1] if more else 0)
