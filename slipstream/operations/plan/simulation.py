"""Simulation of trainings on preemptible capacity: hours, billed hours, interruptions.

The times until a preemption and the waits for a new pod are drawn for every training. Retries and capacity follow
Flyte's rules (:mod:`slipstream.shared.profiles.profile`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.operations.plan.money import HOUR_S, TrainingHours
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import aligned_table
from slipstream.shared.profiles.placement import Placement

RUNS = 10_000
#: Interruptions of a single pod after which it runs on demand.
SYSTEM_RETRIES = 3
#: Attempts after which a training counts as never ending.
MOST_ATTEMPTS = 2_000


class PreemptionTraces(Protocol):
    """Preemption traces of many trainings, in hours."""

    def up(self, chosen: np.ndarray) -> np.ndarray:
        """Return the hours until the next interruption of each of the ``chosen`` trainings."""

    def wait(self, chosen: np.ndarray) -> np.ndarray:
        """Return the hours until each of the ``chosen`` trainings has new pods."""


@dataclass(frozen=True)
class PreemptionRules:
    """Preemption rules.

    ``noticed`` is the fraction of interruptions with a preemption notice in time for a save. With ``falls_back`` the
    third interruption moves the training to on-demand capacity.
    """

    noticed: float = 0.0
    falls_back: bool = False


@dataclass(frozen=True)
class SimulationResults:
    """Results per training, in hours except for ``interruptions``.

    ``hours`` is wall time, ``spot`` and ``on_demand`` are billed, ``lost`` is steps executed twice. Wall time and
    billed spot hours are infinite for trainings that never end.
    """

    hours: np.ndarray
    spot: np.ndarray
    on_demand: np.ndarray
    interruptions: np.ndarray
    lost: np.ndarray

    def dollars(self, spot: float | np.ndarray, on_demand: float) -> np.ndarray:
        """Return the dollars per training at the hourly prices of all its pods."""
        return self.spot * spot + (self.on_demand * on_demand if self.on_demand.any() else 0.0)


def simulate_trainings(
    job: TrainingHours,
    weather: PreemptionTraces,
    rules: PreemptionRules,
    random: np.random.Generator,
    slower: np.ndarray | None = None,
) -> SimulationResults:
    """Simulate trainings of ``job``, one per factor in ``slower`` (default: :data:`RUNS` ones) on its work."""
    slower = np.ones(RUNS) if slower is None else slower
    left = job.work * slower
    every, cycle = job.every, job.every + job.stall
    hours, spot, on_demand, lost = (np.zeros(len(left)) for _ in range(4))
    interrupted = np.zeros(len(left), dtype=np.int64)
    at_work = np.arange(len(left))
    for _ in range(MOST_ATTEMPTS):
        if not len(at_work):
            return SimulationResults(hours, spot, on_demand, interrupted, lost)
        up, needed = weather.up(at_work), until_the_end(job, left[at_work])
        ends = up >= needed
        spot[at_work] += np.minimum(up, needed)
        hours[at_work] += np.minimum(up, needed)
        at_work, worked = at_work[~ends], up[~ends] - job.restart
        warned = random.random(len(at_work)) < rules.noticed
        published = np.floor(np.maximum(worked - job.publish, 0) / cycle) * every
        cycles = np.floor(np.maximum(worked, 0) / cycle)
        done = cycles * every + np.minimum(np.maximum(worked, 0) - cycles * cycle, every)
        saved = np.where(warned, done, published)
        left[at_work] -= saved
        lost[at_work] += done - saved
        interrupted[at_work] += 1
        moves = rules.falls_back & (interrupted[at_work] >= SYSTEM_RETRIES)
        rest = until_the_end(job, left[at_work[moves]])
        on_demand[at_work[moves]] += rest
        hours[at_work[moves]] += rest
        at_work = at_work[~moves]
        hours[at_work] += weather.wait(at_work)
    for amounts in (hours, spot):
        amounts[at_work] = np.inf
    return SimulationResults(hours, spot, on_demand, interrupted, lost)


def until_the_end(job: TrainingHours, left: np.ndarray) -> np.ndarray:
    """Return the hours of an uninterrupted attempt: start, remaining work and its saves."""
    return job.restart + left + np.floor(left / job.every) * job.stall


# Preemptions are a Poisson process at the profile's rate per pod; each ends the attempt of all pods. That trainings
# survive preemption is not simulated, but tested by killing real ones.
DRAWS = 5000


@dataclass(frozen=True)
class TrainingPace:
    """Pace of an undisturbed training.

    ``hours`` of steps; seconds between saves, from snapshot to publication, and from an attempt's end to the next one's
    first step.
    """

    hours: float = 24.0
    save_every_s: float = 600.0
    save_s: float = 30.0
    start_s: float = 180.0

    def __post_init__(self) -> None:
        if min(self.hours, self.save_every_s) <= 0 or min(self.save_s, self.start_s) < 0:
            given = ", ".join(f"{name}={value:g}" for name, value in vars(self).items())
            raise UserError(f"{given}: expected hours and a time between saves above 0, and no negative time")


@dataclass(frozen=True)
class SimulatedTrainings:
    """Simulated trainings: hours of steps executed twice, wall hours, and retries."""

    lost: np.ndarray
    clock: np.ndarray
    retries: np.ndarray


@dataclass(frozen=True)
class ConstantPreemptionRate:
    """Preemption trace at a constant rate, with replacement pods at once."""

    random: np.random.Generator
    per_hour: float

    def up(self, chosen: np.ndarray) -> np.ndarray:
        return self.random.exponential(1 / self.per_hour, len(chosen))

    def wait(self, chosen: np.ndarray) -> np.ndarray:
        return np.zeros(len(chosen))


def simulate_constant_rate(
    random: np.random.Generator, per_hour: float, pace: TrainingPace, *, warned: bool, trainings: int = DRAWS
) -> SimulatedTrainings:
    """Simulate trainings under ``per_hour`` preemptions.

    If ``warned``, they save before every end; otherwise they resume from the last published save.
    """
    start, save, every = (seconds / HOUR_S for seconds in (pace.start_s, pace.save_s, pace.save_every_s))
    job = TrainingHours(pace.hours, every, 0.0, save, start)
    # A second generator keeps the drawn times independent of the rules.
    rules, chance = PreemptionRules(noticed=float(warned)), np.random.default_rng(0)
    found = simulate_trainings(job, ConstantPreemptionRate(random, per_hour), rules, chance, np.ones(trainings))
    last_saves = found.interruptions * save if warned else 0.0
    return SimulatedTrainings(found.lost, found.hours + last_saves, found.interruptions)


def is_warned(placement: Placement, pace: TrainingPace) -> bool:
    """Return True if a pod's preemption notice leaves time for a last save."""
    return placement.notices != "none" and placement.grace_seconds >= pace.save_s


def preemption_table(name: str, placement: Placement, per_day: float, pace: TrainingPace, price: float = 0.0) -> str:
    """Return a table of a profile's training under preemptions, and whether its retries suffice.

    ``per_day`` is preemptions per pod; ``price`` is for a pod-hour, 0 to omit it. Raises ``UserError`` if the placement
    is not on spot or has no rate.
    """
    if not placement.interruptible or per_day <= 0:
        raise UserError(f"profile {name}: trains on no spot capacity; expected interruptible and preemptions_per_day")
    measures: dict[str, Callable[[SimulatedTrainings], np.ndarray]] = {
        "steps lost, %": lambda found: 100 * found.lost / pace.hours,
        "hours": lambda found: found.clock,
        **({"price": lambda found: found.clock * placement.nodes * price} if price else {}),
        "retries": lambda found: found.retries,
    }
    rows, needed = [], np.zeros(0)
    for way, warned in (("saves before each end", True), ("resumes from the last save", False)):
        random, per_hour = np.random.default_rng(0), per_day * placement.nodes / 24
        found = simulate_constant_rate(random, per_hour, pace, warned=warned)
        own = warned == is_warned(placement, pace)
        rows.append([f"{'▸' if own else ' '} {way}", *(spread(of(found)) for of in measures.values())])
        needed = found.retries if own else needed
    return "\n".join(
        [
            f"profile {name}: {pace.hours:g} h of training on {placement.nodes} pods, at {per_day:g} "
            "preemptions a day and pod",
            f"a save every {pace.save_every_s:g} s takes {pace.save_s:g} s; {pace.start_s:g} s from a preemption to "
            f"the next step",
            "",
            aligned_table(("median (5 to 95 %)", *measures), rows, left=("median (5 to 95 %)",)),
            "",
            f"{np.mean(needed <= placement.retries):.1%} end within the {placement.retries} retries of this profile; "
            f"99 % do within {np.quantile(needed, 0.99, method='higher'):.0f}",
        ]
    )


def spread(values: np.ndarray) -> str:
    low, middle, high = (f"{value:.3g}" for value in np.percentile(values, (5, 50, 95), method="nearest"))
    return f"{middle} ({low} to {high})"
