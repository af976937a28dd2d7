"""Simulation of trainings on preemptible capacity: hours, billed hours, interruptions.

For every training, the times until a preemption and the waits for a new pod are drawn; the rest follows from them. To
Flyte, a single pod's preemption is a system failure, and after the third the next attempt runs on demand; preemption of
a PyTorchJob's pods costs a retry and never leads to on-demand capacity (:mod:`slipstream.shared.profiles.profile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.operations.plan.money import TrainingHours

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
