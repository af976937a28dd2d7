"""Names, types, help texts and labels of a pod's Prometheus metrics.

``monitoring/`` uses no Slipstream metrics but these. Units are Prometheus' base units. Names of counters end in
``_total``; histograms add the suffixes of their series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "slipstream_"
#: Labels of a pod: its execution, stage, attempt and node.
POD = ("execution", "task", "attempt", "node")
GPU = (*POD, "gpu_uuid")
#: Labels of a rank; ``gpu_uuid`` is "" on a CPU.
RANK = (*POD, "rank", "gpu_uuid")
#: Suffixes of the series that Prometheus stores for a histogram.
PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Metric:
    """Metric with its full name."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """Names under which Prometheus stores the metric."""
        return tuple(self.name + part for part in PARTS) if self.kind == "histogram" else (self.name,)


GPU_BUSY = Metric(
    f"{PREFIX}gpu_busy_ratio",
    "gauge",
    "Fraction of NVML's window in which any kernel ran, including kernels that wait for NCCL.",
    GPU,
)
GPU_SM_ACTIVE = Metric(
    f"{PREFIX}gpu_sm_active_ratio", "gauge", "Fraction of multiprocessors with work, if the driver reports it.", GPU
)
GPU_MEMORY_USED = Metric(f"{PREFIX}gpu_memory_used_bytes", "gauge", "Memory of the GPU in use by all processes.", GPU)
GPU_MEMORY_LIMIT = Metric(f"{PREFIX}gpu_memory_limit_bytes", "gauge", "Memory of the GPU or of the partition.", GPU)
GPU_POWER = Metric(f"{PREFIX}gpu_power_watts", "gauge", "Power that the GPU draws.", GPU)
GPU_ENERGY = Metric(f"{PREFIX}gpu_energy_joules_total", "counter", "Energy by the driver's counter.", GPU)
GPU_TEMPERATURE = Metric(f"{PREFIX}gpu_temperature_celsius", "gauge", "Temperature of the GPU.", GPU)
GPU_SM_CLOCK = Metric(f"{PREFIX}gpu_sm_clock_hertz", "gauge", "Clock of the multiprocessors.", GPU)
GPU_THROTTLED = Metric(
    f"{PREFIX}gpu_throttled_seconds_total", "counter", "Time for which the GPU was clocked down.", (*GPU, "reason")
)
GPU_IO = Metric(f"{PREFIX}gpu_io_bytes_total", "counter", "Bytes over PCIe and NVLink.", (*GPU, "link", "direction"))
GPU_UP = Metric(f"{PREFIX}gpu_up", "gauge", "1 if the driver answered for the GPU in time, else 0.", GPU)
GPU_INFO = Metric(f"{PREFIX}gpu_info", "gauge", "1, with the GPU's number and name.", (*GPU, "index", "name"))
GPU_SECONDS = Metric(
    f"{PREFIX}gpu_seconds_total", "counter", "Time for which the attempt has held GPUs, summed over them.", POD
)

CPU_WAIT = Metric(
    f"{PREFIX}cpu_wait_seconds_total", "counter", "Time for which runnable processes waited for a core.", POD
)
CPU_THROTTLED = Metric(
    f"{PREFIX}cpu_throttled_seconds_total", "counter", "Time for which the CPU quota throttled the pod.", POD
)
MEMORY_USED = Metric(f"{PREFIX}memory_used_bytes", "gauge", "Memory of the pod in use.", POD)
MEMORY_LIMIT = Metric(f"{PREFIX}memory_limit_bytes", "gauge", "Memory that the pod may use.", POD)

PHASE = Metric(f"{PREFIX}phase_seconds_total", "counter", "Time of the training's phases.", (*RANK, "phase"))
STEPS = Metric(f"{PREFIX}steps_total", "counter", "Steps that the rank has done in this attempt.", RANK)
SAMPLES = Metric(f"{PREFIX}samples_total", "counter", "Samples that the rank has trained on in this attempt.", RANK)
STEP = Metric(f"{PREFIX}step_seconds", "histogram", "Time of a step.", RANK)
LAST_STEP = Metric(f"{PREFIX}last_step_timestamp_seconds", "gauge", "End of the last step, 0 before the first.", RANK)
GOODPUT = Metric(f"{PREFIX}goodput_ratio", "gauge", "Fraction of the training's time that is useful.", POD)
BOTTLENECK = Metric(
    f"{PREFIX}bottleneck_ratio",
    "gauge",
    "Fraction of the training's time that the cause takes.",
    (*POD, "cause"),
)
COST = Metric(
    f"{PREFIX}cost_dollars_total",
    "counter",
    "Cost of the pod until now; price: paid, or on_demand for the same hours.",
    (*POD, "price"),
)

METRICS: tuple[Metric, ...] = (
    *(GPU_BUSY, GPU_SM_ACTIVE, GPU_MEMORY_USED, GPU_MEMORY_LIMIT, GPU_POWER, GPU_ENERGY, GPU_TEMPERATURE, GPU_SM_CLOCK),
    *(GPU_THROTTLED, GPU_IO, GPU_UP, GPU_INFO, GPU_SECONDS),
    *(CPU_WAIT, CPU_THROTTLED, MEMORY_USED, MEMORY_LIMIT),
    *(PHASE, STEPS, SAMPLES, STEP, LAST_STEP, GOODPUT, BOTTLENECK, COST),
)
