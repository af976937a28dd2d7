"""Cost of a training on preemptible capacity, in closed form.

Times are hours; dollars are a price times billed hours. The work W is saved every τ, at a stall C. Interruptions are on
average M apart and cost a restart R. Then B = (W/τ)·M·e^(R/M)·(e^((τ+C)/M) - 1) billed hours (Daly 2006, equation 20),
exact for exponential times. If a checkpoint is published P after its snapshot, P is added to R, because work since the
snapshot is at risk. These are means: wall time also depends on waits for capacity, so hours and deadlines are simulated
(:mod:`slipstream.operations.plan.simulation`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from slipstream.shared.checkpoint_interval import best_seconds
from slipstream.shared.errors import UserError

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


TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|h|d)?")
#: Longest time in seconds: a hundred years.
LONGEST_S = 100 * 365 * 86400.0
SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class TimeParam(click.ParamType):
    """Parameter type for times such as 20ms, 90min or 8h, converted to ``unit``, which is also the default unit."""

    name = "time"

    def __init__(self, unit: str, such_as: str) -> None:
        self.unit, self.such_as = unit, such_as

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = TIME.fullmatch(str(value).strip())
        number, unit = (float(match[1]), match[2] or self.unit) if match else (0.0, self.unit)
        if not 1e-9 <= number * SECONDS[unit] <= LONGEST_S:
            option = param.opts[0] if param else "time"
            raise UserError(f"{option} {value}: expected a time above 0, such as {self.such_as}, up to 100 years")
        return number * (SECONDS[unit] / SECONDS[self.unit])
