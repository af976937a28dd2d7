"""Device measurements of a training over all its attempts, on one time axis."""

from __future__ import annotations

from dataclasses import dataclass, field

#: File name in the artifact; the file is absent if nothing was sampled.
DEVICES = "devices.json"
#: Upper limit of plausible timestamps, in seconds since 1970.
LATEST = 1e11


@dataclass(frozen=True)
class DeviceSeries:
    """Readings of a GPU, or of a CPU-only pod's processors, one per entry of :attr:`PodSeries.at`."""

    name: str
    #: "gpu" or "cpu".
    kind: str
    #: Share of time (0 to 1) in which a kernel ran (NVML's utilisation) or the CPUs worked; share of memory in use.
    #: None if unknown.
    busy: list[float | None]
    memory: list[float | None]
    #: Share of streaming multiprocessors with work; empty if the driver does not report it.
    sm_active: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class PodSeries:
    """Readings of a pod during one attempt, at the times ``at`` (seconds since 1970, UTC)."""

    attempt: int
    node: str
    at: list[float]
    devices: list[DeviceSeries]
    #: Seconds from first to last sample.
    seconds: float
    #: Energy of all GPUs; None if the driver does not count it.
    energy_joules: float | None = None
    #: Largest share (0 to 1) of a device's memory in use.
    largest_memory: float | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible times or shares, and for series of unequal length."""
        if not all(0 <= at < LATEST for at in (*self.at, self.seconds)):
            raise ValueError("expected seconds since 1970")
        for device in self.devices:
            for values in (device.busy, device.memory, device.sm_active or device.busy):
                if len(values) != len(self.at) or any(not 0 <= value <= 1e3 for value in values if value):
                    raise ValueError(f"{device.name}: expected a share for each of {len(self.at)} times")


@dataclass(frozen=True)
class AttemptSpan:
    """Start, duration, end and events of one attempt, for the time axis of the device readings."""

    number: int
    #: Start in seconds since 1970, UTC; 0 if an older version did not record it.
    began_at: float
    seconds: float
    ended: str
    spot: bool | None
    #: Seconds of its steps that a later attempt repeated.
    lost: float
    #: Times in seconds since its start at which evaluations and checkpoints ended, by event name.
    events: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = (self.began_at, self.seconds, *(at for each in self.events.values() for at in each))
        if not all(0 <= at < LATEST for at in times):
            raise ValueError("expected seconds of at least 0")


@dataclass(frozen=True)
class TrainingDevices:
    """Contents of ``devices.json``."""

    attempts: list[AttemptSpan]
    pods: list[PodSeries]
