"""Closed forms of cost against the simulation, and the choice between spot and on demand by both."""

import math
from dataclasses import replace

import numpy as np
import pytest

from slipstream.operations.plan.capacity import PodCapacity
from slipstream.operations.plan.money import (
    TrainingHours,
    billed_with_notices,
    break_even,
    mean_billed_hours,
    own_interval,
)
from slipstream.operations.plan.simulation import PreemptionRules, simulate_trainings

JOB = TrainingHours(work=24, every=0.25, stall=0.005, publish=0.02, restart=0.1)
SEVERAL = ((2.0, 0.5), (6.0, 1.0), (24.0, 0.3))


def simulated(job: TrainingHours, between: float, wait: float, *, noticed: float = 0.0, runs: int = 20_000):
    random = np.random.default_rng(7)
    weather = PodCapacity("", rate=1 / between).weather(1, runs, random)
    return simulate_trainings(
        job, replace(weather, mean_waits=np.full(runs, wait)), PreemptionRules(noticed), random, np.ones(runs)
    )


@pytest.mark.parametrize(("between", "wait"), SEVERAL)
def test_what_is_billed_is_the_simulations_to_a_percent(between: float, wait: float) -> None:
    found = simulated(JOB, between, wait)
    expected = mean_billed_hours(JOB, between)
    assert found.spot.mean() == pytest.approx(expected, rel=0.01)
    assert found.interruptions.mean() == pytest.approx(expected / between, rel=0.03)
    # On the clock, with the waits for capacity.
    assert found.hours.mean() == pytest.approx(expected * (1 + wait / between), rel=0.02)


@pytest.mark.parametrize("noticed", [0.5, 1.0])
@pytest.mark.parametrize(("between", "wait"), SEVERAL)
def test_with_notices_to_three_percent(between: float, wait: float, noticed: float) -> None:
    found = simulated(JOB, between, wait, noticed=noticed)
    assert found.spot.mean() == pytest.approx(billed_with_notices(JOB, between, noticed), rel=0.03)


def test_half_an_interval_of_those_that_nobody_warned_of_is_lost() -> None:
    rare = TrainingHours(work=48, every=0.8, stall=0, publish=0.0, restart=0)
    found = simulated(rare, 4.0, 0.0, noticed=0.5).spot.mean() / 48 - 1
    assert found == pytest.approx(billed_with_notices(rare, 4.0, 0.5) / 48 - 1, rel=0.15)
    assert found == pytest.approx(0.5 * 0.4 / 4, rel=0.15)


def test_work_that_is_not_interrupted_takes_what_it_takes() -> None:
    assert mean_billed_hours(JOB, 1e7) == pytest.approx(JOB.undisturbed, rel=1e-4)
    assert mean_billed_hours(JOB, 1e-4) == math.inf
    assert billed_with_notices(JOB, 0.1, 0.0) == math.inf


def test_two_hundred_cases_are_decided_alike() -> None:
    """Wherever the costs differ by 5 % or more."""
    random, compared = np.random.default_rng(38), 0
    for _ in range(200):
        between = float(np.exp(random.uniform(np.log(0.5), np.log(48))))
        stall, publish = random.uniform(0, 0.01), random.uniform(0, 0.05)
        every = own_interval(stall, publish, between)
        job = TrainingHours(float(random.uniform(1, 40)), every, stall, publish, float(random.uniform(0.01, 0.4)))
        price, expected = float(random.uniform(0.2, 0.99)), mean_billed_hours(job, between)
        if abs(price * expected / job.undisturbed - 1) < 0.05:
            continue
        found = float(simulated(job, between, 0.5, runs=1000).spot.mean())
        assert (price * expected < job.undisturbed) == (price * found < job.undisturbed), (job, between, price)
        compared += 1
    assert compared > 150


def test_the_break_even_is_where_both_cost_the_same() -> None:
    between = break_even(lambda _: JOB, 0.5)
    assert between and 0.5 * mean_billed_hours(JOB, between) == pytest.approx(JOB.undisturbed, rel=0.01)
    assert 0.5 * mean_billed_hours(JOB, between / 2) > JOB.undisturbed
    assert break_even(lambda _: JOB, 1.0) is None


def test_times_that_no_training_has_are_refused() -> None:
    for wrong in ({"work": 0.0}, {"every": 0.0}, {"stall": -1.0}):
        with pytest.raises(ValueError, match="expected"):
            replace(JOB, **wrong)
