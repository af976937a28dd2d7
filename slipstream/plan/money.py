"""Cost of a training on preemptible capacity, in closed form.

All times are hours; dollars are a price times billed hours. Checkpoints are τ apart and stall the work W for C.
Interruptions are on average M apart and cost a restart R. Then B = (W/τ)·M·e^(R/M)·(e^((τ+C)/M) - 1) (Daly 2006,
equation 20), exact for exponential times. A checkpoint published P after its snapshot adds to R the risk of the work
since then. These are means: wall time depends on how capacity comes and goes, so hours and deadlines are simulated
(:mod:`slipstream.plan.simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.checkpoint_interval import best_seconds

HOUR_S = 3600.0
#: Hours between interruptions that bound the search for a break-even.
RAREST, MOST_FREQUENT = 1e5, 1e-3


@dataclass(frozen=True)
class Job:
    """Training in hours.

    Undisturbed ``work`` without saves, work between saves, the stall of a save, snapshot to publication, and attempt
    start to first step.
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
        """Hours without interruptions: one start, the work, its saves."""
        return self.restart + self.work * (1 + self.stall / self.every)


def own_interval(stall: float, publish: float, between: float) -> float:
    """Return the trainer's hours between saves for ``between`` hours between interruptions."""
    return best_seconds(stall * HOUR_S, publish * HOUR_S, between * HOUR_S) / HOUR_S


def billed(job: Job, between: float) -> float:
    """Return the mean billed hours without preemption notices, including the first start; infinite if it never ends."""
    try:
        segment = math.exp((job.restart + job.publish) / between) * math.expm1((job.every + job.stall) / between)
        # The first start is at risk, too, but the formula counts only starts after an interruption.
        return between * (job.work / job.every * segment + math.expm1(job.restart / between))
    except OverflowError:
        return math.inf


def billed_with_notices(job: Job, between: float, noticed: float) -> float:
    """Return the mean billed hours, to first order, if a share ``noticed`` gets a notice in time for a save."""
    unwarned = (1 - noticed) * ((job.every + job.stall) / 2 + job.publish)
    useful = 1 - (job.restart + unwarned) / between
    return job.undisturbed / useful if useful > 0 else math.inf


def break_even(job_at: Callable[[float], Job], price: float, noticed: float = 0.0) -> float | None:
    """Return the hours between interruptions from which spot costs less, at ``price`` relative to on demand.

    ``job_at`` returns the job with its interval for these hours. None if spot always or never costs less.
    """

    def pays(between: float) -> bool:
        job = job_at(between)
        cost = billed_with_notices(job, between, noticed) if noticed else billed(job, between)
        return price * cost < job.undisturbed

    low, high = MOST_FREQUENT, RAREST
    if pays(low) or not pays(high):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
