"""Cost of a training on preemptible capacity, in closed form.

Times are hours; dollars are a price times billed hours. The work W is saved every τ, at a stall C. Interruptions are on
average M apart and cost a restart R. Then B = (W/τ)·M·e^(R/M)·(e^((τ+C)/M) - 1) billed hours (Daly 2006, equation 20),
exact for exponential times. If a checkpoint is published P after its snapshot, P is added to R, because work since the
snapshot is at risk. These are means: wall time also depends on waits for capacity, so hours and deadlines are simulated
(:mod:`slipstream.operations.plan.simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.shared.checkpoint_interval import best_seconds

HOUR_S = 3600.0
#: Search range for the break-even, in hours between interruptions.
RAREST, MOST_FREQUENT = 1e5, 1e-3


@dataclass(frozen=True)
class TrainingHours:
    """Durations of a training in hours.

    ``work`` is undisturbed, without saves; ``every`` is the work between saves; ``stall`` is a save's pause;
    ``publish`` follows its snapshot; ``restart`` precedes the first step.
    """

    work: float
    every: float
    stall: float
    publish: float
    restart: float

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible times."""
        if min(self.work, self.every) <= 0 or min(self.stall, self.publish, self.restart) < 0:
            raise ValueError(f"{self}: work and an interval above 0, and no negative time expected")

    @property
    def undisturbed(self) -> float:
        """Hours without interruptions: one start, the work and its saves."""
        return self.restart + self.work * (1 + self.stall / self.every)


def own_interval(stall: float, publish: float, between: float) -> float:
    """Return the trainer's hours between saves for ``between`` hours between interruptions."""
    return best_seconds(stall * HOUR_S, publish * HOUR_S, between * HOUR_S) / HOUR_S


def mean_billed_hours(job: TrainingHours, between: float) -> float:
    """Return the mean billed hours without preemption notices, including the first start.

    Infinite if the training never ends.
    """
    try:
        segment = math.exp((job.restart + job.publish) / between) * math.expm1((job.every + job.stall) / between)
        # The first start is at risk, too, but the formula counts only starts after an interruption.
        return between * (job.work / job.every * segment + math.expm1(job.restart / between))
    except OverflowError:
        return math.inf


def billed_with_notices(job: TrainingHours, between: float, noticed: float) -> float:
    """Return the mean billed hours, to first order, if a fraction ``noticed`` of interruptions allows a save."""
    unwarned = (1 - noticed) * ((job.every + job.stall) / 2 + job.publish)
    useful = 1 - (job.restart + unwarned) / between
    return job.undisturbed / useful if useful > 0 else math.inf


def break_even(job_at: Callable[[float], TrainingHours], price: float, noticed: float = 0.0) -> float | None:
    """Return the hours between interruptions from which spot costs less; None if it always or never does.

    ``price`` is spot relative to on demand. ``job_at`` returns the job for given hours between interruptions.
    """

    def pays(between: float) -> bool:
        job = job_at(between)
        cost = billed_with_notices(job, between, noticed) if noticed else mean_billed_hours(job, between)
        return price * cost < job.undisturbed

    low, high = MOST_FREQUENT, RAREST
    if pays(low) or not pays(high):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
