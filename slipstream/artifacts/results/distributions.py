"""Distribution of the training rows of an exported model (``distributions.json`` of its package).

Rows that are scored later are counted in the same bins. Older packages lack the file.
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTIONS = "distributions.json"


@dataclass(frozen=True)
class Bins:
    """Counts of rows by value.

    The first count is of missing values. The others are of numbers below, between and above the ``edges`` (upper ends
    of bins), or of every one of the ``texts`` and of all other texts.
    """

    edges: list[float]
    texts: list[str]
    counts: list[int]

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless there is a count for every bin and the edges ascend."""
        if len(self.counts) != len(self.edges) + len(self.texts) + 2 or min(self.counts) < 0:
            raise ValueError("expected a count of at least 0 for every bin")
        if self.edges != sorted(set(self.edges)) or (self.edges and self.texts):
            raise ValueError("the edges of the bins do not ascend")

    @property
    def ordered(self) -> bool:
        """True if neighbouring bins are similar, as those of numbers are."""
        return not self.texts


@dataclass(frozen=True)
class Distributions:
    """Distributions over a sample of the training ``rows``: of every raw column, if any, and of the predictions.

    A prediction is the probability of the second of two ``classes``, the most probable of more classes, or the value.
    """

    rows: int
    columns: dict[str, Bins]
    predictions: Bins
