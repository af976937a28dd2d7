"""Device measurements of a training over all its attempts, on one time axis."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The artifact's file, absent if nothing was sampled.
DEVICES = "devices.json"
#: Later than any machine's clock, in seconds since 1970.
LATEST = 1e11


@dataclass(frozen=True)
class DeviceSeries:
    """Readings of a GPU, or of the processors of a pod without one, between consecutive times of the pod."""

    name: str
    #: "gpu" or "cpu".
    kind: str
    #: Shares 0 to 1: of the time in which a kernel ran (NVML's utilisation) or of the processors' time; of memory.
    busy: list[float | None]
    memory: list[float | None]
    #: Share of multiprocessors with work, if the driver reports it.
    sm_active: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class PodSeries:
    """Readings of a pod during one attempt; ``at`` is in seconds since 1970, UTC."""

    attempt: int
    node: str
    at: list[float]
    devices: list[DeviceSeries]
    #: Seconds for which it was sampled.
    seconds: float
    #: None if no driver counts it.
    energy_joules: float | None = None
    #: Largest share of a device's memory in use.
    largest_memory: float | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible times, and for series of other lengths."""
        if not all(0 <= at < LATEST for at in (*self.at, self.seconds)):
            raise ValueError("expected seconds since 1970")
        for device in self.devices:
            for values in (device.busy, device.memory, device.sm_active or device.busy):
                if len(values) != len(self.at) or any(not 0 <= value <= 1e3 for value in values if value):
                    raise ValueError(f"{device.name}: expected a share for each of {len(self.at)} times")


@dataclass(frozen=True)
class AttemptSpan:
    """Attempt on the time axis."""

    number: int
    #: Seconds since 1970, UTC; 0 if an older version of this project did not record it.
    began_at: float
    seconds: float
    ended: str
    spot: bool | None
    #: Seconds of its steps that a later attempt repeated.
    lost: float
    #: Seconds since its start at which an evaluation or a checkpoint ended, by name.
    events: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible times."""
        times = (self.began_at, self.seconds, *(at for each in self.events.values() for at in each))
        if not all(0 <= at < LATEST for at in times):
            raise ValueError("expected seconds of at least 0")


@dataclass(frozen=True)
class TrainingDevices:
    """Contents of ``devices.json``."""

    attempts: list[AttemptSpan]
    pods: list[PodSeries]
