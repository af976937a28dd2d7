"""Metrics of a pod: their names, and the Prometheus text exposition format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from slipstream.shared.telemetry.records import (
    COMPUTE,
    DATA,
    EXCHANGE,
    OPTIMIZER,
    REST,
    STEP_BOUNDS,
    DeviceReading,
    RankTotals,
    Sample,
)
from slipstream.shared.telemetry.totals import NodeTotals

# ``monitoring/`` uses no Slipstream metrics but these. Units are Prometheus' base units. Names of counters end in
# ``_total``; histograms add the suffixes of their series.
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


#: Phases of a step.
STEP_PHASES = (DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST)


@dataclass(frozen=True)
class MetricLabels:
    """Labels of all metrics of a pod."""

    execution: str
    task: str
    attempt: int
    node: str


#: Suffix of the metric's name, labels in addition to the pod's, and value.
Line = tuple[str, dict[str, object], float]


@dataclass(frozen=True)
class MetricFamily:
    """Metric with all its lines."""

    metric: Metric
    lines: list[Line] = field(default_factory=list)


def metrics_exposition(
    sample: Sample | None,
    node: NodeTotals,
    ranks: Sequence[RankTotals],
    labels: MetricLabels,
    counters_only: bool = False,
) -> str:
    """Return the exposition text, which ends with a line break.

    Metrics without a value are omitted; ``counters_only`` omits gauges as well.
    """
    families = [*(pod_families(sample) if sample else []), *node_families(node), *rank_families(ranks)]
    wanted = [each for each in families if each.lines and not (counters_only and each.metric.kind == "gauge")]
    return "".join(text_of(family, asdict(labels)) for family in wanted)


def pod_families(sample: Sample) -> Iterator[MetricFamily]:
    """Yield the sampled metrics of devices and host."""
    devices, host = sample.devices, sample.host
    yield each_device(GPU_BUSY, devices, lambda gpu: gpu.busy)
    yield each_device(GPU_SM_ACTIVE, devices, lambda gpu: gpu.sm_active)
    yield each_device(GPU_MEMORY_USED, devices, lambda gpu: gpu.memory_used_bytes)
    yield each_device(GPU_MEMORY_LIMIT, devices, lambda gpu: gpu.memory_limit_bytes)
    yield each_device(GPU_POWER, devices, lambda gpu: gpu.power_watts)
    yield each_device(GPU_TEMPERATURE, devices, lambda gpu: gpu.temperature_celsius)
    yield each_device(GPU_SM_CLOCK, devices, lambda gpu: gpu.sm_clock_hertz)
    yield each_device(GPU_UP, devices, lambda gpu: int(gpu.up))
    io: list[Line] = [
        ("", {"gpu_uuid": gpu.uuid, "link": link, "direction": direction}, value)
        for gpu in devices
        for (link, direction), value in gpu.io_bytes.items()
    ]
    yield MetricFamily(GPU_IO, io)
    called: list[Line] = [("", {"gpu_uuid": gpu.uuid, "index": gpu.index, "name": gpu.name}, 1) for gpu in devices]
    yield MetricFamily(GPU_INFO, called)
    yield one(CPU_WAIT, host.cpu_wait_seconds)
    yield one(CPU_THROTTLED, host.throttled_seconds)
    yield one(MEMORY_USED, host.memory_used_bytes)
    yield one(MEMORY_LIMIT, host.memory_limit_bytes)


def node_families(node: NodeTotals) -> Iterator[MetricFamily]:
    """Yield energy, throttling, GPU time and cost on this node."""
    yield MetricFamily(GPU_ENERGY, [("", {"gpu_uuid": uuid}, joules) for uuid, joules in node.energy_joules.items()])
    throttled: list[Line] = [
        ("", {"gpu_uuid": uuid, "reason": reason}, seconds)
        for uuid, reasons in node.throttled_seconds.items()
        for reason, seconds in reasons.items()
    ]
    yield MetricFamily(GPU_THROTTLED, throttled)
    yield one(GPU_SECONDS, node.gpu_seconds or None)
    yield MetricFamily(COST, [("", {"price": price}, spent) for price, spent in node.cost_dollars.items()])


def rank_families(ranks: Sequence[RankTotals]) -> Iterator[MetricFamily]:
    """Yield the progress of the ranks on this node."""
    phases: list[Line] = [
        ("", {"phase": phase, **names_of(rank)}, seconds)
        for rank in ranks
        for phase, seconds in rank.phase_seconds.items()
    ]
    yield MetricFamily(PHASE, phases)
    yield each_rank(STEPS, ranks, lambda rank: rank.steps_now or rank.steps)
    yield each_rank(SAMPLES, ranks, lambda rank: rank.samples)
    yield MetricFamily(STEP, [line for rank in ranks for line in histogram(rank)])
    yield each_rank(LAST_STEP, ranks, lambda rank: rank.last_step_at)
    yield MetricFamily(GOODPUT, [("", {}, rank.goodput) for rank in ranks if rank.goodput is not None])
    causes: list[Line] = [("", {"cause": cause}, share) for rank in ranks for cause, share in rank.bottlenecks.items()]
    yield MetricFamily(BOTTLENECK, causes)


def histogram(rank: RankTotals) -> Iterator[Line]:
    for bound, steps in zip(STEP_BOUNDS, rank.steps_within, strict=True):
        yield "_bucket", {"le": str(bound), **names_of(rank)}, steps
    yield "_bucket", {"le": "+Inf", **names_of(rank)}, rank.steps
    yield "_sum", names_of(rank), sum(rank.phase_seconds.get(phase, 0.0) for phase in STEP_PHASES)
    yield "_count", names_of(rank), rank.steps


def names_of(rank: RankTotals) -> dict[str, object]:
    return {"rank": rank.rank, "gpu_uuid": rank.gpu_uuid}


def each_device(
    metric: Metric, devices: Iterable[DeviceReading], value_of: Callable[[DeviceReading], float | None]
) -> MetricFamily:
    values = ((device.uuid, value_of(device)) for device in devices)
    return MetricFamily(metric, [("", {"gpu_uuid": uuid}, value) for uuid, value in values if value is not None])


def each_rank(metric: Metric, ranks: Iterable[RankTotals], value_of: Callable[[RankTotals], float]) -> MetricFamily:
    return MetricFamily(metric, [("", names_of(rank), value_of(rank)) for rank in ranks])


def one(metric: Metric, value: float | None) -> MetricFamily:
    return MetricFamily(metric, [] if value is None else [("", {}, value)])


def text_of(family: MetricFamily, common: dict[str, object]) -> str:
    metric = family.metric
    lines = (f"{metric.name}{suffix}{{{labels_of(common | own)}}} {value!r}\n" for suffix, own, value in family.lines)
    return f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{''.join(lines)}"


def labels_of(labels: dict[str, object]) -> str:
    return ",".join(f'{name}="{escaped(str(value))}"' for name, value in labels.items())


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
