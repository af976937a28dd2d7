"""Records of a scored table: its manifest entry and its publication."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class AsideReason:
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
    reasons: list[AsideReason]
    drift: DriftFigures

    def __post_init__(self) -> None:
        """Raise ``ValueError`` unless every row was scored or quarantined."""
        if self.rows != self.scored + self.set_aside:
            raise ValueError(f"of {self.rows} rows {self.scored} were scored and {self.set_aside} quarantined")


@dataclass(frozen=True)
class Publication:
    """Pointer to a scored table, written after the complete table.

    ``number`` counts from 1, ``manifest`` is the SHA-256 of the table's manifest, ``at`` the time. ``run`` is unique
    per run, so that a run can tell its own publication from that of a concurrent run.
    """

    number: int
    key: str
    manifest: str
    model: str
    at: str
    run: str
