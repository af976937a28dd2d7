"""Distribution of the training rows, stored in an exported model (``distributions.json``).

Scoring counts its rows in the same bins to measure drift. Older exports lack the file.
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTIONS = "distributions.json"


@dataclass(frozen=True)
class Bins:
    """Histogram of a column or of the predictions.

    ``counts`` starts with missing values. For numbers, the bins below, between and above ``edges`` follow; for texts,
    one count per entry of ``texts`` and one for all other texts.
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
        """True for bins of numbers, whose order has a meaning; False for texts."""
        return not self.texts


@dataclass(frozen=True)
class Distributions:
    """Histograms over a sample of the training ``rows``: of every raw column, if any, and of the predictions.

    With two classes, a prediction is the probability of the second; with more, the most probable class; for regression,
    the value.
    """

    rows: int
    columns: dict[str, Bins]
    predictions: Bins
