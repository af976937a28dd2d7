"""Samples condensed for a chart: means of intervals, counters with resets, devices by their rank."""

from dataclasses import replace

import pytest

from slipstream.shared.telemetry.records import DeviceReading, HostReading, Sample
from slipstream.shared.telemetry.series import condense_samples, energy_joules
from tests.support.sampler_process import device

HOST = HostReading(cpu_seconds=0.0, cpus=2.0, memory_used_bytes=1 << 30, memory_limit_bytes=4 << 30)


def samples_of(count: int, *devices: DeviceReading) -> list[Sample]:
    """One a second, half a CPU of two in use."""
    return [Sample(100.0 + at, replace(HOST, cpu_seconds=0.5 * at), devices) for at in range(count)]


def test_a_pod_without_gpus_is_its_processors() -> None:
    found = condense_samples(samples_of(11), 3, "node-7", points=5)
    assert found is not None and (found.attempt, found.node, found.seconds) == (3, "node-7", 10.0)
    assert found.at == [102.0, 104.0, 106.0, 108.0, 110.0]
    (cpu,) = found.devices
    assert (cpu.name, cpu.kind, cpu.busy, cpu.memory) == ("2 CPUs", "cpu", [0.25] * 5, [0.25] * 5)
    assert found.energy_joules is None and found.largest_memory == 0.25


def test_devices_are_called_by_their_ranks_where_these_are_known() -> None:
    ups = samples_of(5, device("GPU-a", 0), device("GPU-b", 1))
    found = condense_samples(ups, 1, "", {"GPU-b": 5})
    assert found is not None and [each.name for each in found.devices] == ["GPU 0", "rank 5"]
    alone = condense_samples(ups, 1, "")
    assert alone is not None and [each.name for each in alone.devices] == ["GPU 0", "GPU 1"]


def test_each_value_counts_once_and_a_missing_one_not_at_all() -> None:
    values = [0.9, 0.2, None, 0.4, None, None]
    samples = [Sample(100.0 + at, HOST, (replace(device("GPU-a", 0), busy=busy),)) for at, busy in enumerate(values)]
    found = condense_samples(samples, 1, "", points=2)
    # What the first sample says is of the time before it.
    assert found is not None and found.devices[0].busy == pytest.approx([0.2, 0.4])


def test_a_counter_that_begins_again_is_added() -> None:
    joules = [100.0, 150.0, 30.0, 40.0]
    samples = [
        Sample(100.0 + at, HOST, (replace(device("GPU-a", 0), energy_joules=value),)) for at, value in enumerate(joules)
    ]
    assert energy_joules(samples) == 50 + 30 + 10
    assert energy_joules(samples_of(3)) is None


@pytest.mark.parametrize("count", [0, 1])
def test_one_sample_is_no_series(count: int) -> None:
    assert condense_samples(samples_of(count), 1, "") is None
