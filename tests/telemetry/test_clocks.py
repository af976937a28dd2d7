"""Cost of reduced clocks: only for faults of the machine, and only if they last."""

from dataclasses import replace

import pytest

from slipstream.shared.telemetry.records import HostReading, Sample
from slipstream.shared.telemetry.series import clocked_down
from tests.support.sampler_process import device


def samples_of(*clocks: tuple[float, tuple[str, ...]]) -> list[Sample]:
    """One a second of a device; the first is of the time before."""
    return [
        Sample(100.0 + at, HostReading(0.0, 1.0), (replace(device("GPU-a", 0), sm_clock_hertz=hertz, throttled=why),))
        for at, (hertz, why) in enumerate([(1e9, ()), *clocks])
    ]


HOT = ("hw_thermal_slowdown",)


def test_heat_costs_what_the_clock_lacks() -> None:
    half = samples_of(*[(1e9, HOT)] * 4, *[(2e9, ())] * 4)
    assert clocked_down(half, {"GPU-a": 2e9}) == pytest.approx(4 * 0.5)
    assert clocked_down(half, {}) == pytest.approx(4 * 0.5), "the largest that was seen"
    always = samples_of(*[(1e9, HOT)] * 8)
    assert clocked_down(always, {"GPU-a": 4e9}) == pytest.approx(8 * 0.75)


@pytest.mark.parametrize("why", [(), ("sw_power_cap",), ("applications_clocks_setting",)])
def test_a_cap_is_no_fault(why: tuple[str, ...]) -> None:
    assert clocked_down(samples_of(*[(1e9, why)] * 8), {"GPU-a": 2e9}) == 0.0


def test_a_moment_of_it_does_not_count() -> None:
    assert clocked_down(samples_of((1e9, HOT), *[(2e9, ())] * 8), {"GPU-a": 2e9}) == 0.0
    assert clocked_down([], {}) == 0.0
