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
    #: Seconds from its pod's start to its own.
    before: float = 0.0

    def __post_init__(self) -> None:
        times = (self.began_at, self.seconds, self.before, *(at for each in self.events.values() for at in each))
        if not all(0 <= at < LATEST for at in times):
            raise ValueError("expected seconds of at least 0")


@dataclass(frozen=True)
class TrainingDevices:
    """Contents of ``devices.json``."""

    attempts: list[AttemptSpan]
    pods: list[PodSeries]


# It is for display only; no other artifact depends on it.
DATA, COMMUNICATION, STRAGGLER, LAUNCH = "data", "communication", "straggler", "launch"
THROTTLED, CHECKPOINT, EVALUATION, LATE_PODS = "throttled", "checkpoint", "evaluation", "late pods"
CAUSES = (DATA, COMMUNICATION, STRAGGLER, LAUNCH, THROTTLED, CHECKPOINT, EVALUATION, LATE_PODS)
#: Upper limit of plausible seconds in a record, above any training's.
LONGEST_S = 1e10
#: Verdict that is not among :data:`CAUSES`: other work on the same CPUs.
CONTENDED = "contended"


@dataclass(frozen=True)
class AttemptLosses:
    """Measurements of one attempt while it trained."""

    #: Wall-clock seconds of all steps, the waits between them, evaluations and pauses for checkpoints.
    seconds: float
    steps: int
    #: Seconds by phase of a step, summed over steps and averaged over ranks.
    phases: dict[str, float]
    #: Seconds that the attempt would save without a cause, by cause (:data:`CAUSES`).
    lost: dict[str, float]
    #: Evidence by cause, as part of a sentence.
    evidence: dict[str, str]
    #: Share of the steps' time for which a rank waited for a CPU core, maximum over ranks.
    waited_for_processor: float
    #: Gradient exchange: bytes per step and rank, and seconds per step of waiting for it, minimum over ranks.
    exchanged_bytes: int = 0
    least_exchange_s: float = 0.0
    #: Whether the model was sharded or pipelined; "communication" and "straggler" are then indistinguishable.
    divided: bool = False


#: Seconds of possible gain below which nothing is advised.
WORTH_SAVING_S = 10.0


@dataclass(frozen=True)
class Bottleneck:
    """Diagnosis over all attempts of a training."""

    #: Largest of :data:`CAUSES`; :data:`CONTENDED`; or "" if nothing stands out.
    verdict: str
    #: Sentence with the figures, the step time without the cause, and a remedy to try.
    sentence: str
    #: Share of the training's time (0 to 1) by cause, for all causes found.
    shares: dict[str, float]
    #: Share of the training's time (0 to 1) in which the devices computed and no cause cost time.
    useful: float
    #: Speedup if the diagnosed cause vanished; 1 if there is none.
    gain: float
    #: Other causes below the threshold of a diagnosis that may be worth a look, largest first.
    also: list[str]
    seconds: float
    steps: int
    phases: dict[str, float]
    #: Gradient exchange of the longest attempt, as in :class:`AttemptLosses`.
    exchanged_bytes: int = 0
    least_exchange_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.seconds < LONGEST_S and 0 <= self.useful <= 1 and 1 <= self.gain < LONGEST_S):
            raise ValueError("expected seconds above 0, a useful share of 0 to 1 and a gain of at least 1")
        if not all(0 <= value < LONGEST_S for value in (*self.phases.values(), *self.shares.values())):
            raise ValueError("expected phases and shares of at least 0")
        if not (0 <= self.least_exchange_s < LONGEST_S and 0 <= self.exchanged_bytes < LONGEST_S * 1e6):
            raise ValueError("expected bytes and seconds of an exchange of at least 0")

    @property
    def saved_s(self) -> float:
        """Seconds that removing the diagnosed cause would save.

        The wait for late pods is not part of ``seconds``.
        """
        return self.seconds * ((self.gain - 1) if self.verdict == LATE_PODS else (1 - 1 / self.gain))

    @property
    def pays(self) -> bool:
        """True if removing the diagnosed cause would save enough to be advised."""
        return self.saved_s >= WORTH_SAVING_S
