"""Into how many micro-batches a share of a batch can be divided."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.train.loop.step import micro_batches, padded_rows
from slipstream.train.parallel.config import ParallelConfig


def legal_numbers(share: int, parallel: ParallelConfig, least_rows: int = 1) -> list[int]:
    """The numbers for a share of so many rows that differ in the rows of a micro-batch, of which each has at least
    ``least_rows``: from the fewest that the layout allows on, in whole rounds of a pipeline. Those
    alone if the layout allows none."""
    rounds = parallel.pipeline
    fewest = rounds * parallel.stages_per_rank
    most = max(share // least_rows, fewest)
    numbers, rows = list[int](), 0
    for number in range(fewest, most + 1, rounds):
        each = -(-share // number)
        pieces = len(micro_batches(padded_rows(share, number), number))
        # There may be fewer pieces than were asked for, and an interleaved schedule takes whole rounds only.
        whole = pieces >= fewest and (parallel.schedule != "interleaved" or pieces % rounds == 0)
        if each != rows and whole:
            numbers.append(number)
            rows = each
    return numbers or [fewest]


def doubled(number: int, legal: Sequence[int]) -> int:
    """The first of the ``legal`` numbers, in order, that is at least twice as large, else the last if it is larger at
    all; 0 if there are no more."""
    more = [other for other in legal if other > number]
    return next((other for other in more if other >= 2 * number), more[-1] if more else 0)
