"""How a training goes, for whoever watches it: no part of any artifact, and nothing is computed from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.artifacts.results.training import LossPoint, ValidationPoint


@dataclass(frozen=True)
class AttemptSoFar:
    """One attempt. Steps are those that the optimiser had taken when it began, at its last save, and now."""

    number: int
    processes: int
    first_step: int
    saved_step: int
    last_step: int
    #: Seconds since it began.
    wall: float
    #: Absent before its first step.
    rows_per_s: float | None
    #: Why it ended; empty while it runs.
    ended: str


@dataclass(frozen=True)
class TrainingSoFar:
    """The course of the losses, of which the points since the last evaluation are those of rank 0 alone, and all
    attempts."""

    step: int
    steps_total: int
    skipped: int
    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint | None
    attempts: list[AttemptSoFar] = field(default_factory=list)
