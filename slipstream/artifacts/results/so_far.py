"""Live progress of a training, for display; not part of any artifact, and nothing is computed from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.artifacts.results.training import LossPoint, ValidationPoint


@dataclass(frozen=True)
class AttemptSoFar:
    """Progress of one attempt, with the optimiser's step count at its start, at its last save, and now."""

    number: int
    processes: int
    first_step: int
    saved_step: int
    last_step: int
    #: Seconds since its start.
    wall: float
    #: Absent before its first step.
    rows_per_s: float | None
    #: Reason of its end; empty while it runs.
    ended: str


@dataclass(frozen=True)
class TrainingSoFar:
    """Losses and attempts of a training up to now.

    Loss points since the last evaluation are those of rank 0 only.
    """

    step: int
    steps_total: int
    skipped: int
    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint | None
    attempts: list[AttemptSoFar] = field(default_factory=list)
