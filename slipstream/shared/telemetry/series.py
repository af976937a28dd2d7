"""Samples of a pod, condensed for charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from slipstream.shared.artifacts.results.devices import DeviceSeries, PodSeries
from slipstream.shared.telemetry.records import DeviceReading, Sample, counted_since

POINTS = 240
NO_RANKS: Mapping[str, int] = {}


def condense_samples(
    samples: Sequence[Sample], attempt: int, node: str, ranks: Mapping[str, int] = NO_RANKS, points: int = POINTS
) -> PodSeries | None:
    """Return the samples as at most ``points`` means per series; None for fewer than two samples.

    ``ranks`` are the devices' ranks by UUID, where known.
    """
    if len(samples) < 2:
        return None
    ends = sorted({round(number * (len(samples) - 1) / points) for number in range(1, points + 1)} - {0})
    spans = [samples[begin : end + 1] for begin, end in pairwise([0, *ends])]
    last = samples[-1]
    devices = [of_gpu(number, spans, ranks) for number in range(len(last.devices))] or [of_host(spans)]
    memory = [share for device in devices for share in device.memory if share is not None]
    return PodSeries(
        attempt=attempt,
        node=node,
        at=[span[-1].at for span in spans],
        devices=devices,
        seconds=last.at - samples[0].at,
        energy_joules=energy_joules(samples),
        largest_memory=max(memory, default=None),
    )


def of_gpu(number: int, spans: Sequence[Sequence[Sample]], ranks: Mapping[str, int]) -> DeviceSeries:
    """Return the series of the device at index ``number``."""

    def means(value: Callable[[DeviceReading], float | None]) -> list[float | None]:
        return [
            mean_of_known(value(sample.devices[number]) for sample in span[1:] if number < len(sample.devices))
            for span in spans
        ]

    its = spans[-1][-1].devices[number]
    sm_active = means(lambda reading: reading.sm_active)
    return DeviceSeries(
        name=f"rank {ranks[its.uuid]}" if its.uuid in ranks else f"GPU {its.index}",
        kind="gpu",
        busy=means(lambda reading: reading.busy),
        memory=means(lambda reading: share(reading.memory_used_bytes, reading.memory_limit_bytes)),
        sm_active=sm_active if any(value is not None for value in sm_active) else [],
    )


def of_host(spans: Sequence[Sequence[Sample]]) -> DeviceSeries:
    """Return the CPU and memory series of a pod without GPUs."""
    busy = [cpu_use(span[0], span[-1]) for span in spans]
    memory = [
        mean_of_known(share(sample.host.memory_used_bytes, sample.host.memory_limit_bytes) for sample in span[1:])
        for span in spans
    ]
    return DeviceSeries(f"{spans[-1][-1].host.cpus:g} CPUs", "cpu", busy, memory)


def cpu_use(first: Sample, last: Sample) -> float | None:
    """Return a pod's CPU utilisation between two samples, 0 to 1; None if they have the same time."""
    available = (last.at - first.at) * last.host.cpus
    used = last.host.cpu_seconds - first.host.cpu_seconds
    return min(1.0, max(0.0, used / available)) if available > 0 else None


def energy_joules(samples: Sequence[Sample]) -> float | None:
    """Return all devices' joules from first to last sample; None if no device counts them."""
    total, counted = 0.0, False
    for before, after in pairwise(samples):
        known = {device.uuid: device.energy_joules for device in before.devices}
        for device in after.devices:
            then, now = known.get(device.uuid), device.energy_joules
            if then is not None and now is not None:
                total, counted = total + counted_since(then, now), True
    return total if counted else None


def mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


#: Throttling reasons that indicate a fault. Power caps are intended, and idle GPUs are clocked down as well.
FAULTS = {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
#: Minimum throttled fraction of a device's time; less does not count.
SHARE = 0.25


def clocked_down(samples: Sequence[Sample], largest: Mapping[str, float]) -> float:
    """Return the most seconds that any device lost to lower clocks.

    Work is assumed proportional to the clock. ``largest`` are maximum clocks in hertz by UUID; for missing devices it
    is the highest sampled clock.
    """
    whole: dict[str, float] = {}
    slow: dict[str, list[tuple[float, float]]] = {}
    seen = dict(largest)
    for before, sample in pairwise(samples):
        seconds = sample.at - before.at
        for device in sample.devices:
            clock = device.sm_clock_hertz
            if clock is None:
                continue
            whole[device.uuid] = whole.get(device.uuid, 0.0) + seconds
            if device.uuid not in largest:
                seen[device.uuid] = max(seen.get(device.uuid, 0.0), clock)
            if FAULTS.intersection(device.throttled):
                slow.setdefault(device.uuid, []).append((seconds, clock))
    lost = [
        sum(seconds * max(0.0, 1 - clock / seen[uuid]) for seconds, clock in spans)
        for uuid, spans in slow.items()
        if seen[uuid] > 0 and sum(seconds for seconds, _ in spans) >= SHARE * whole[uuid]
    ]
    return max(lost, default=0.0)
