"""What a training takes on capacity that is taken away, in closed form. Hours throughout; dollars are a price times
billed hours.

With work W between checkpoints τ apart, each of which stalls it for C, and interruptions on average M apart, each of
which costs a restart R: B = (W/τ)·M·e^(R/M)·(e^((τ+C)/M) - 1) (Daly 2006, equation 20), exact for exponential times. A
checkpoint that is published P after its snapshot adds to R what the work since then is at risk for. These are means:
times on the clock depend on how capacity comes and goes, so hours and deadlines are simulated
(:mod:`slipstream.plan.simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.checkpoint_interval import best_seconds

HOUR_S = 3600.0
#: Hours between interruptions, within which a break-even is looked for.
RAREST, MOST_FREQUENT = 1e5, 1e-3


@dataclass(frozen=True)
class Job:
    """A training in hours: undisturbed ``work`` without saves, work from one save to the next, the stall of a save,
    from its snapshot to its publication, and from the start of an attempt to its first step."""

    work: float
    every: float
    stall: float
    publish: float
    restart: float

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for times that no training has."""
        if min(self.work, self.every) <= 0 or min(self.stall, self.publish, self.restart) < 0:
            raise ValueError(f"{self}: work and an interval above 0, and no negative time expected")

    @property
    def undisturbed(self) -> float:
        """Hours where nothing is taken away: one start, the work, its saves."""
        return self.restart + self.work * (1 + self.stall / self.every)


def own_interval(stall: float, publish: float, between: float) -> float:
    """Hours between saves as the trainer sets them where it is told the hours ``between`` interruptions."""
    return best_seconds(stall * HOUR_S, publish * HOUR_S, between * HOUR_S) / HOUR_S


def billed(job: Job, between: float) -> float:
    """Mean hours that are paid for, the first start included, if nobody is warned; infinite if it never ends."""
    try:
        segment = math.exp((job.restart + job.publish) / between) * math.expm1((job.every + job.stall) / between)
        # The first start is at risk as the others, but the formula counts only those that follow an interruption.
        return between * (job.work / job.every * segment + math.expm1(job.restart / between))
    except OverflowError:
        return math.inf


def billed_with_notices(job: Job, between: float, noticed: float) -> float:
    """The same to first order, where a share ``noticed`` of interruptions is warned of in time for a save."""
    unwarned = (1 - noticed) * ((job.every + job.stall) / 2 + job.publish)
    useful = 1 - (job.restart + unwarned) / between
    return job.undisturbed / useful if useful > 0 else math.inf


def break_even(job_at: Callable[[float], Job], price: float, noticed: float = 0.0) -> float | None:
    """Hours between interruptions from which on spot capacity costs less, at ``price`` of what it costs on demand.

    ``job_at`` is the job with the interval for that many hours. None if it costs less however often it is taken away,
    or never.
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
