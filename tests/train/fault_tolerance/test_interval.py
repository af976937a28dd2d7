"""The interval between checkpoints minimises the loss."""

import math

import pytest

from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval, RankTimings
from slipstream.shared.checkpoint_interval import LARGEST_SHARE, young_daly


def expected_time(interval_s: float, cost_s: float, between_failures_s: float) -> float:
    """Seconds for one second of work under exponential failures, restart free (Daly 2006, equation 20)."""
    return between_failures_s / interval_s * (math.exp((interval_s + cost_s) / between_failures_s) - 1)


@pytest.mark.parametrize(("cost", "between"), [(0.01, 20), (1, 100), (60, 3600), (300, 3600)])
def test_daly_is_within_a_thousandth_of_the_best_that_a_search_finds(cost: float, between: float) -> None:
    best = min(expected_time(between * 1.01**-k, cost, between) for k in range(1500))
    assert expected_time(young_daly(cost, between), cost, between) < best * 1.001


def test_steps_are_steps_and_seconds_are_as_many_steps_as_fit() -> None:
    assert CheckpointInterval(steps=400).between(RankTimings(step_s=0.05, stall_s=1, publish_s=9)) == 400
    assert CheckpointInterval(seconds=30).between(RankTimings(step_s=0.05, stall_s=1, publish_s=9)) == 600


def test_auto_bounds_the_share_of_checkpoints_and_never_overlaps_them() -> None:
    auto = CheckpointInterval(mean_time_between_failures_s=20)
    steps = auto.between(RankTimings(step_s=0.05, stall_s=0.5, publish_s=0.1))
    assert 0.5 / (steps * 0.05) <= LARGEST_SHARE
    assert auto.between(RankTimings(step_s=0.05, stall_s=0.001, publish_s=4)) * 0.05 >= 4
    assert auto.between(RankTimings(step_s=0.05, stall_s=0.01, publish_s=0.1)) == math.ceil(young_daly(0.01, 20) / 0.05)
