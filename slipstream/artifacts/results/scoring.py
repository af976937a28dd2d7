"""Scored table: the contents of its manifest and of its publication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KIND = "score"


@dataclass(frozen=True)
class Stability:
    """Drift of a column, or of the predictions, of the scored rows against the training rows."""

    name: str
    #: Population stability index; None with too few rows.
    index: float | None
    #: Probability of an index this large without drift.
    chance: float | None
    #: Whether the index is above the threshold, and not by chance.
    alarm: bool


@dataclass(frozen=True)
class DriftFigures:
    """Drift of the scored rows against the training rows."""

    #: Reason why it is unknown; "" if it is known.
    unknown: str
    threshold: float
    #: The predictions first; then the columns, the largest index first.
    measured: list[Stability]

    @property
    def alarms(self) -> list[Stability]:
        return [each for each in self.measured if each.alarm]


@dataclass(frozen=True)
class AsideReason:
    """Rows that were quarantined for one reason, with the first as an example."""

    rows: int
    reason: str
    column: str
    file: str
    line: int


@dataclass(frozen=True)
class ScoredTable:
    """Manifest of a scored table besides its files, independent of the place and time of scoring."""

    #: Digest of data, model and settings that identifies the table.
    key: str
    #: Digest of the raw data.
    data: str
    #: Version of the model, and the SHA-256 of its manifest.
    model: str
    model_manifest: str
    #: Source of the inputs: "raw columns", "prepared columns" or "images".
    by: str
    target: str
    #: In the order of the columns of probabilities; empty for a regression.
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
    """Pointer to a scored table, written once the table is whole.

    ``number`` counts from 1, ``manifest`` is the SHA-256 of the manifest, ``at`` the time. ``run`` makes the bytes of
    every run unique, so that a store can tell which one it accepted.
    """

    number: int
    key: str
    manifest: str
    model: str
    at: str
    run: str
