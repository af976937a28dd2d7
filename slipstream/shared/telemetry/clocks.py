"""GPU time lost to throttling for heat or power supply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from slipstream.shared.telemetry.records import Sample

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
