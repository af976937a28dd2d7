"""The predicted step time in cases that can be worked out by hand."""

import pytest

from slipstream.shared.interconnect.model.hockney import (
    Compute,
    TimeEstimate,
    bucket_sizes,
    predict_step_time,
    step_seconds,
)

MB = 1 << 20


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    assert bucket_sizes([30 * MB, 10 * MB, 10 * MB, 10 * MB, 2 * MB]) == [2 * MB, 30 * MB, 30 * MB]
    assert bucket_sizes([100]) == [100]
    assert bucket_sizes([]) == []


def test_communication_that_fits_into_the_backward_pass_costs_its_last_bucket_only() -> None:
    compute = Compute(1.0, 4.0, 0.5, (MB,) * 4)
    assert step_seconds(compute, [MB] * 4, lambda size: 0.25) == pytest.approx(1 + 4 + 0.25 + 0.5)


def test_communication_that_takes_longer_than_the_backward_pass_is_waited_for() -> None:
    compute = Compute(1.0, 4.0, 0.5, (MB,) * 4)
    assert step_seconds(compute, [MB] * 4, lambda size: 3.0) == pytest.approx(1 + 1 + 4 * 3.0 + 0.5)


def test_the_interval_is_carried_along() -> None:
    compute = Compute(0.1, 0.2, 0.0, (MB,) * 3)
    found = predict_step_time(compute, lambda size: TimeEstimate(0.5, 0.4, 0.7))
    assert (found.step.low, found.step.seconds, found.step.high) == pytest.approx(
        (0.966667, 1.166667, 1.566667), rel=1e-5
    )
    assert found.efficiency.low < found.efficiency.seconds < found.efficiency.high
    assert found.efficiency.seconds == pytest.approx(0.3 / 1.166667, rel=1e-5)


def test_without_a_network_a_step_is_its_computation() -> None:
    compute = Compute(0.1, 0.2, 0.05, (MB,))
    assert predict_step_time(compute, lambda size: TimeEstimate(0, 0, 0)).efficiency.seconds == pytest.approx(1)
