"""Records of a scored table: its manifest entry and its publication."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KIND = "score"


@dataclass(frozen=True)
class Stability:
    """Drift of one column, or of the predictions, between training rows and scored rows."""

    name: str
    #: Population stability index; None if there are too few rows.
    index: float | None
    #: Probability of an index this large without drift.
    chance: float | None
    #: Whether the index exceeds the threshold and is significant.
    alarm: bool


@dataclass(frozen=True)
class DriftFigures:
    """Drift between training rows and scored rows."""

    #: Reason why drift could not be measured; "" if it was.
    unknown: str
    threshold: float
    #: Predictions first, then columns by descending index.
    measured: list[Stability]

    @property
    def alarms(self) -> list[Stability]:
        return [each for each in self.measured if each.alarm]

    @property
    def why_unknown(self) -> str:
        """Reason why no drift is known; "" if one is."""
        return self.unknown or ("too few rows" if all(each.index is None for each in self.measured) else "")


@dataclass(frozen=True)
class QuarantineCount:
    """Number of rows quarantined for one reason, and column, file and line of the first."""

    rows: int
    reason: str
    column: str
    file: str
    line: int


@dataclass(frozen=True)
class ScoredTable:
    """Description of a scored table in its manifest; independent of where and when it was scored."""

    #: Digest of data, model and settings, which identifies the table.
    key: str
    #: Digest of the raw data.
    data: str
    #: Version of the model, and SHA-256 of its manifest.
    model: str
    model_manifest: str
    #: Kind of inputs: "raw columns", "prepared columns" or "images".
    by: str
    target: str
    #: Classes in the order of the probability columns; empty for regression.
    classes: list[str]
    settings: dict[str, Any]
    rows: int
    scored: int
    set_aside: int
    reasons: list[QuarantineCount]
    drift: DriftFigures

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless every row was scored or quarantined."""
        if self.rows != self.scored + self.set_aside:
            raise ValueError(f"of {self.rows} rows {self.scored} were scored and {self.set_aside} quarantined")


@dataclass(frozen=True)
class Publication:
    """Pointer to a scored table, written after the complete table.

    ``number`` counts from 1, ``manifest`` is the SHA-256 of the table's manifest, ``at`` the time. ``run`` is unique
    per run, so that a run can tell its own publication from others.
    """

    number: int
    key: str
    manifest: str
    model: str
    at: str
    run: str


@dataclass(frozen=True)
class PromotionRequest:
    """Addresses of the exported model to promote, of its prepared data, and of the registry."""

    exported: str
    prepared: str
    registry: str


@dataclass(frozen=True)
class PromotionDecision:
    """Decision whether a model may replace the model in production.

    ``number`` is the promotion's number unless another run promotes a model first.
    """

    passed: bool
    number: int
    why: str


@dataclass(frozen=True)
class Promotion:
    """Outcome of promoting a model to the registry at ``registry``.

    ``version`` is the model's version in the registry, or "" if it was not stored.
    """

    promoted: bool
    registry: str
    version: str
    why: str


# Scoring counts its rows in the same bins to measure drift. Older exports lack the file.
DISTRIBUTIONS = "distributions.json"


@dataclass(frozen=True)
class Bins:
    """Histogram of a column or of the predictions.

    ``counts`` starts with missing values. For numbers, the bins below, between and above ``edges`` follow; for texts,
    one count per entry of ``texts`` and one for all others.
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
    the value. ``ranges`` are those of numbers and times over all training rows; older packages lack them.
    """

    rows: int
    columns: dict[str, Bins]
    predictions: Bins
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
