"""Samples of devices and host, taken every second per pod, and totals of every rank.

Totals never decrease while their process lives. Values that driver, kernel or cloud do not report are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Phases of a training step: waiting for a batch; from the batch to the last gradient; from the last gradient to the
#: end of the backward pass (waiting for the gradient exchange); the optimiser; everything else until the next batch.
DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST = "data", "compute", "exchange", "optimizer", "rest"
#: Phases between steps: evaluations, and steps blocked by checkpoints.
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
#: Environment variable with the seconds that a worker's agent waited for the job's other pods.
WAITED_FOR_PODS = "SLIPSTREAM_WAITED_FOR_PODS"
PHASES = (DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST, EVALUATION, CHECKPOINT)

#: Reasons for lower GPU clocks, in the order of NVML's bits; only NVIDIA GPUs report them.
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
    """Reading of a GPU or partition."""

    uuid: str
    index: int
    name: str
    #: False if the driver timed out or lost the device; only uuid, index and name are then valid.
    up: bool = True
    #: NVML's utilisation, 0 to 1: the fraction of its window in which any kernel ran, including kernels that wait for
    #: NCCL.
    busy: float | None = None
    #: Fraction of multiprocessors with work, 0 to 1, if the driver reports it (GPM, since Hopper).
    sm_active: float | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    power_watts: float | None = None
    #: The driver's energy counter.
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    #: Current reasons for lower clocks, from :data:`THROTTLED`.
    throttled: tuple[str, ...] = ()
    #: Cumulative bytes by (link, direction): ("pcie" or "nvlink", "in" or "out").
    io_bytes: dict[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class HostReading:
    """Reading of this process's control group, else of the machine; seconds are cumulative."""

    cpu_seconds: float
    #: Usable CPUs.
    cpus: float
    #: Seconds for which the training's processes were ready to run but had no processor.
    cpu_wait_seconds: float = 0.0
    #: Seconds for which the CPU quota throttled the group, throttled periods, and all periods.
    throttled_seconds: float = 0.0
    throttled_periods: int = 0
    periods: int = 0
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True)
class Sample:
    """Sample of a pod; ``at`` is seconds since 1970, UTC."""

    at: float
    host: HostReading
    devices: tuple[DeviceReading, ...] = ()


@dataclass(frozen=True)
class RankTotals:
    """Totals of a rank in this attempt, written to ``ranks/<rank>.json`` about every second."""

    rank: int
    #: UUID of its GPU; "" on a CPU.
    gpu_uuid: str
    steps: int
    samples: int
    #: Seconds by phase (:data:`PHASES`).
    phase_seconds: dict[str, float]
    #: Cumulative histogram: steps that took at most each of :data:`STEP_BOUNDS` seconds.
    steps_within: list[int]
    #: End of the last step, seconds since 1970, UTC; 0 before the first.
    last_step_at: float = 0.0
    #: Fractions of time, 0 to 1: useful, and lost to every cause; rank 0 only.
    goodput: float | None = None
    bottlenecks: dict[str, float] = field(default_factory=dict)
    #: Number of this attempt, from 1 on.
    attempt: int = 1
    #: Steps done when the totals were read; 0 in the file.
    steps_now: int = 0


#: Upper bounds of the step time histogram, in seconds.
STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def counted_since(before: float, now: float) -> float:
    """Return a driver counter's increase; a lower value means that the driver restarted it at 0."""
    return now - before if now >= before else now
