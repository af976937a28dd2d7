"""Trainings under capacity that comes and goes, by simulation: hours, what is billed, interruptions.

Of each training the times for which it has its pods, and for which it then waits, are drawn; what happens in between
is computed. Flyte's rule: a preempted single pod is a system failure, and after the third of these its next attempt
runs on demand; the preempted pods of a PyTorchJob cost a retry and never move (:mod:`slipstream.profiles.retries`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.plan.money import Job

RUNS = 10_000
#: Interruptions of a single pod after which it runs on demand.
SYSTEM_RETRIES = 3
#: Attempts after which a training is taken not to end.
MOST_ATTEMPTS = 2_000


class Weather(Protocol):
    """How capacity comes and goes for each of many trainings; hours."""

    def up(self, chosen: np.ndarray) -> np.ndarray:
        """For how long the ``chosen`` trainings have their pods this time."""

    def wait(self, chosen: np.ndarray) -> np.ndarray:
        """For how long they then wait for others."""


@dataclass(frozen=True)
class Rules:
    """The share of interruptions that are warned of in time for a save, and whether the third moves the training to
    capacity on demand."""

    noticed: float = 0.0
    falls_back: bool = False


@dataclass(frozen=True)
class Simulated:
    """Of each training: hours on the clock, hours billed on spot capacity and on demand, interruptions, and hours of
    steps that were executed twice. The clock and what is billed are infinite for those that do not end."""

    hours: np.ndarray
    spot: np.ndarray
    on_demand: np.ndarray
    interruptions: np.ndarray
    lost: np.ndarray

    def dollars(self, spot: float | np.ndarray, on_demand: float) -> np.ndarray:
        """Of each training, at these prices of an hour of all its pods; ``spot`` for all or for each."""
        return self.spot * spot + (self.on_demand * on_demand if self.on_demand.any() else 0.0)


def simulate(
    job: Job, weather: Weather, rules: Rules, random: np.random.Generator, slower: np.ndarray | None = None
) -> Simulated:
    """Trainings of ``job``, as many as ``slower`` has factors of its work; by default :data:`RUNS` of the same."""
    slower = np.ones(RUNS) if slower is None else slower
    left = job.work * slower
    every, cycle = job.every, job.every + job.stall
    hours, spot, on_demand, lost = (np.zeros(len(left)) for _ in range(4))
    interrupted = np.zeros(len(left), dtype=np.int64)
    at_work = np.arange(len(left))
    for _ in range(MOST_ATTEMPTS):
        if not len(at_work):
            return Simulated(hours, spot, on_demand, interrupted, lost)
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
    return Simulated(hours, spot, on_demand, interrupted, lost)


def until_the_end(job: Job, left: np.ndarray) -> np.ndarray:
    """Hours of an attempt that is not interrupted: its start, the work left, and its saves."""
    return job.restart + left + np.floor(left / job.every) * job.stall
