"""A scored table: what its manifest says of it, and what its publication does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KIND = "score"


@dataclass(frozen=True)
class Stability:
    """How a column, or the predictions, of the scored rows is distributed beside the training rows."""

    name: str
    #: The population stability index; None with too few rows.
    index: float | None
    #: The probability of an index so large if nothing drifts.
    chance: float | None
    #: Whether the index is above the threshold, and no chance.
    alarm: bool


@dataclass(frozen=True)
class DriftFigures:
    """Whether the scored rows are distributed as the training rows were."""

    #: Why nobody knows; "" if it is known.
    unknown: str
    threshold: float
    #: The predictions first; then the columns, the largest index first.
    measured: list[Stability]

    @property
    def alarms(self) -> list[Stability]:
        return [each for each in self.measured if each.alarm]


@dataclass(frozen=True)
class AsideReason:
    """Rows that were set aside for one reason, the first of them as an example."""

    rows: int
    reason: str
    column: str
    file: str
    line: int


@dataclass(frozen=True)
class ScoredTable:
    """What the manifest of a scored table says besides its files: nothing that depends on where or when it was made."""

    #: What identifies it: a digest of data, model and settings.
    key: str
    #: The digest of the raw data.
    data: str
    #: The version of the model, and the SHA-256 of its manifest.
    model: str
    model_manifest: str
    #: How rows became inputs: "raw columns", "prepared columns" or "images".
    by: str
    target: str
    #: In the order of the columns of probabilities; none of a regression.
    classes: list[str]
    settings: dict[str, Any]
    rows: int
    scored: int
    set_aside: int
    reasons: list[AsideReason]
    drift: DriftFigures

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless every row was scored or set aside."""
        if self.rows != self.scored + self.set_aside:
            raise ValueError(f"of {self.rows} rows {self.scored} were scored and {self.set_aside} set aside")


@dataclass(frozen=True)
class Publication:
    """The pointer to a scored table, which is there once it is whole: its ``number`` from 1 on, the ``manifest``'s
    SHA-256, and when. ``run`` makes the bytes of each run its own, so that a store can tell whose it took."""

    number: int
    key: str
    manifest: str
    model: str
    at: str
    run: str
