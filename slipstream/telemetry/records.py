"""What is observed of devices, host and ranks: one sample a second of a pod, and the totals of each rank in it.

Totals only grow while their process lives; a value that a driver, kernel or cloud does not give is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Parts of a rank's training step, in seconds: waiting for a batch; from the batch to the last gradient; from there
#: until the backward pass has returned, which waits for the exchange; the optimiser; what is left until the next batch.
DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST = "data", "compute", "exchange", "optimizer", "rest"
#: Between steps: evaluations, and what checkpoints stop.
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
#: In a worker's environment: seconds that its agent waited for the other pods of the job.
WAITED_FOR_PODS = "SLIPSTREAM_WAITED_FOR_PODS"
PHASES = (DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST, EVALUATION, CHECKPOINT)

#: Reasons for which a GPU is clocked down, in the order of NVML's bits; others have none.
THROTTLED = (
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
    "board_limit",
    "reliability",
)


@dataclass(frozen=True)
class DeviceReading:
    """A GPU, or a partition of one, at one time."""

    uuid: str
    index: int
    name: str
    #: False if the driver did not answer in time or lost the device; then nothing else is known but the names.
    up: bool = True
    #: NVML's utilisation, 0 to 1: the share of its window in which any kernel ran, those that wait for NCCL included.
    busy: float | None = None
    #: The share of multiprocessors with work, 0 to 1, where the driver has it (GPM, from Hopper on).
    sm_active: float | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    power_watts: float | None = None
    #: A counter of the driver's.
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    #: The reasons for which it is clocked down now, of :data:`THROTTLED`.
    throttled: tuple[str, ...] = ()
    #: Counters of bytes by (link, direction): ("pcie" or "nvlink", "in" or "out").
    io_bytes: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class HostReading:
    """The control group of this process (the machine, where there is none) at one time. Counters are in seconds."""

    cpu_seconds: float
    #: CPUs that may be used.
    cpus: float
    #: For which the watched processes were ready to run and had no processor.
    cpu_wait_seconds: float = 0.0
    #: For which the group's quota stopped it, its periods in which it did, and all its periods.
    throttled_seconds: float = 0.0
    throttled_periods: int = 0
    periods: int = 0
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True)
class Sample:
    """A pod at one time; ``at`` is seconds since 1970, UTC."""

    at: float
    host: HostReading
    devices: tuple[DeviceReading, ...] = ()


@dataclass(frozen=True)
class RankTotals:
    """What a rank has done in this attempt so far, which it writes to ``ranks/<rank>.json`` every second or so."""

    rank: int
    #: Of its GPU; "" on a CPU.
    gpu_uuid: str
    steps: int
    samples: int
    #: Seconds by :data:`PHASES`.
    phase_seconds: dict[str, float]
    #: How many steps took at most so many seconds: one count for each of :data:`STEP_BOUNDS`, each with those before.
    steps_within: list[int]
    #: When the last step ended, seconds since 1970, UTC; 0 before the first.
    last_step_at: float = 0.0
    #: Of rank 0 alone: the shares 0 to 1 of useful time and of each cause.
    goodput: float | None = None
    bottlenecks: dict[str, float] = field(default_factory=dict)


#: Upper bounds of the histogram of step times, in seconds.
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def counted_since(before: float, now: float) -> float:
    """What a driver's counter has counted: one that is less than before began anew, with the driver."""
    return now - before if now >= before else now
