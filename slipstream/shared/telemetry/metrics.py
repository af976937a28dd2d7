"""Metrics of a pod in the Prometheus text exposition format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from slipstream.shared.telemetry import names
from slipstream.shared.telemetry.names import Metric
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

#: Phases of a step.
STEP = (DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST)


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
    yield each_device(names.GPU_BUSY, devices, lambda gpu: gpu.busy)
    yield each_device(names.GPU_SM_ACTIVE, devices, lambda gpu: gpu.sm_active)
    yield each_device(names.GPU_MEMORY_USED, devices, lambda gpu: gpu.memory_used_bytes)
    yield each_device(names.GPU_MEMORY_LIMIT, devices, lambda gpu: gpu.memory_limit_bytes)
    yield each_device(names.GPU_POWER, devices, lambda gpu: gpu.power_watts)
    yield each_device(names.GPU_TEMPERATURE, devices, lambda gpu: gpu.temperature_celsius)
    yield each_device(names.GPU_SM_CLOCK, devices, lambda gpu: gpu.sm_clock_hertz)
    yield each_device(names.GPU_UP, devices, lambda gpu: int(gpu.up))
    io: list[Line] = [
        ("", {"gpu_uuid": gpu.uuid, "link": link, "direction": direction}, value)
        for gpu in devices
        for (link, direction), value in gpu.io_bytes.items()
    ]
    yield MetricFamily(names.GPU_IO, io)
    called: list[Line] = [("", {"gpu_uuid": gpu.uuid, "index": gpu.index, "name": gpu.name}, 1) for gpu in devices]
    yield MetricFamily(names.GPU_INFO, called)
    yield one(names.CPU_WAIT, host.cpu_wait_seconds)
    yield one(names.CPU_THROTTLED, host.throttled_seconds)
    yield one(names.MEMORY_USED, host.memory_used_bytes)
    yield one(names.MEMORY_LIMIT, host.memory_limit_bytes)


def node_families(node: NodeTotals) -> Iterator[MetricFamily]:
    """Yield energy, throttling, GPU time and cost on this node."""
    yield MetricFamily(
        names.GPU_ENERGY, [("", {"gpu_uuid": uuid}, joules) for uuid, joules in node.energy_joules.items()]
    )
    throttled: list[Line] = [
        ("", {"gpu_uuid": uuid, "reason": reason}, seconds)
        for uuid, reasons in node.throttled_seconds.items()
        for reason, seconds in reasons.items()
    ]
    yield MetricFamily(names.GPU_THROTTLED, throttled)
    yield one(names.GPU_SECONDS, node.gpu_seconds or None)
    yield MetricFamily(names.COST, [("", {"price": price}, spent) for price, spent in node.cost_dollars.items()])


def rank_families(ranks: Sequence[RankTotals]) -> Iterator[MetricFamily]:
    """Yield the progress of the ranks on this node."""
    phases: list[Line] = [
        ("", {"phase": phase, **names_of(rank)}, seconds)
        for rank in ranks
        for phase, seconds in rank.phase_seconds.items()
    ]
    yield MetricFamily(names.PHASE, phases)
    yield each_rank(names.STEPS, ranks, lambda rank: rank.steps)
    yield each_rank(names.SAMPLES, ranks, lambda rank: rank.samples)
    yield MetricFamily(names.STEP, [line for rank in ranks for line in histogram(rank)])
    yield each_rank(names.LAST_STEP, ranks, lambda rank: rank.last_step_at)
    yield MetricFamily(names.GOODPUT, [("", {}, rank.goodput) for rank in ranks if rank.goodput is not None])
    causes: list[Line] = [("", {"cause": cause}, share) for rank in ranks for cause, share in rank.bottlenecks.items()]
    yield MetricFamily(names.BOTTLENECK, causes)


def histogram(rank: RankTotals) -> Iterator[Line]:
    for bound, steps in zip(STEP_BOUNDS, rank.steps_within, strict=True):
        yield "_bucket", {"le": str(bound), **names_of(rank)}, steps
    yield "_bucket", {"le": "+Inf", **names_of(rank)}, rank.steps
    yield "_sum", names_of(rank), sum(rank.phase_seconds.get(phase, 0.0) for phase in STEP)
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
