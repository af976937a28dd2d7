"""How the training rows of an exported model are distributed: ``distributions.json`` of its package.

Rows that are scored later are counted in the same bins. Packages from before the file was there lack it.
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTIONS = "distributions.json"


@dataclass(frozen=True)
class Bins:
    """Counts of rows by value: first of missing values; then of numbers below, between and above the ``edges`` (each
    the upper end of its bin), or of each of the ``texts`` and of all others."""

    edges: list[float]
    texts: list[str]
    counts: list[int]

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless there is a count for each bin, and each bin is above the one before."""
        if len(self.counts) != len(self.edges) + len(self.texts) + 2 or min(self.counts) < 0:
            raise ValueError("the counts are not those of the bins")
        if self.edges != sorted(set(self.edges)) or (self.edges and self.texts):
            raise ValueError("the edges of the bins do not rise")

    @property
    def ordered(self) -> bool:
        """Whether neighbouring bins are alike, as those of numbers are."""
        return not self.texts


@dataclass(frozen=True)
class Distributions:
    """Of a sample of the training ``rows``: each raw column, where there are such; and what the model predicts of them,
    which is the probability of the second of two ``classes``, the class of more, or the value."""

    rows: int
    columns: dict[str, Bins]
    predictions: Bins
