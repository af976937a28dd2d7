"""Live progress of a training: display only, part of no artifact."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.shared.artifacts.results.training import LossPoint, ValidationPoint


@dataclass(frozen=True)
class LiveAttempt:
    """Progress of one attempt; steps are optimiser steps at its start, at its last checkpoint, and now."""

    number: int
    processes: int
    first_step: int
    saved_step: int
    last_step: int
    #: Seconds since its start.
    wall: float
    #: Rows per second; None before the first step.
    rows_per_s: float | None
    #: Reason of its end; "" while it runs.
    ended: str


@dataclass(frozen=True)
class LiveProgress:
    """Losses and attempts of a training up to now.

    Loss points after the last evaluation are rank 0's only.
    """

    step: int
    steps_total: int
    skipped: int
    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint | None
    attempts: list[LiveAttempt] = field(default_factory=list)
