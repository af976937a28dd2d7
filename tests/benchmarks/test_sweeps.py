"""Simulated sweeps of the benchmark."""

import pytest

from harness.sweeps.problem import GIVEN, RATE, Problem
from harness.sweeps.simulation import Found, Preemptions, Simulation, config_of

PROBLEM = Problem(3)


def swept(workers: int, preemptions: Preemptions, trials: int = 10) -> Found:
    return Simulation(PROBLEM, config_of(3, trials), preemptions).run(workers)


def test_learning_curves_cross() -> None:
    fast, slow = {**GIVEN, RATE: 2e-2}, {**GIVEN, RATE: 3e-3}
    assert PROBLEM.noiseless(fast, 2) < PROBLEM.noiseless(slow, 2)
    assert PROBLEM.noiseless(fast) > PROBLEM.noiseless(slow)
    assert 0.05 < PROBLEM.crossing(200) < 0.5


def test_an_evaluation_says_the_same_again() -> None:
    assert PROBLEM.loss(GIVEN, 5) == PROBLEM.loss({}, 5) != PROBLEM.loss({}, 6)
    assert PROBLEM.loss({}, 5) != Problem(4).loss({}, 5)


def test_one_worker_is_at_work_all_the_time_and_several_are_sooner_done() -> None:
    one, four = swept(1, Preemptions()), swept(4, Preemptions())
    assert one.time == pytest.approx(one.cost)
    assert four.time < one.time / 1.5
    assert four.cost <= 4 * four.time + 1e-9


def test_a_preempted_worker_finds_the_same_and_repeats_what_it_did_not_keep() -> None:
    undisturbed, resumed, again = (
        swept(1, each) for each in (Preemptions(), Preemptions(0.3), Preemptions(0.3, resumes=False))
    )
    assert undisturbed.loss == resumed.loss == again.loss
    assert undisturbed.complete == resumed.complete == again.complete
    assert undisturbed.cost < resumed.cost < 1.3 * undisturbed.cost < again.cost


def test_a_budget_ends_a_search() -> None:
    whole = config_of(3, 100, "random", "none")
    found = Simulation(PROBLEM, whole, Preemptions(), budget=4.0).run(1)
    assert 4.0 <= found.cost < 5.3
    assert 3 <= found.complete <= 6
