"""What is known of a pod as Prometheus reads it: the text exposition format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from slipstream.telemetry.records import (
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
from slipstream.telemetry.totals import NodeTotals

PREFIX = "slipstream_"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
#: The phases that a step is made of.
STEP = (DATA, COMPUTE, EXCHANGE, OPTIMIZER, REST)


@dataclass(frozen=True)
class Labels:
    """Whose metrics they are."""

    execution: str
    task: str
    attempt: int
    node: str


#: A line: what follows the family's name, the labels besides those of the pod, the value.
Line = tuple[str, dict[str, object], float]


@dataclass(frozen=True)
class Family:
    """A metric with all of its series."""

    name: str
    kind: str
    help: str
    lines: list[Line] = field(default_factory=list)


def exposition(
    sample: Sample | None,
    node: NodeTotals,
    ranks: Sequence[RankTotals],
    labels: Labels,
    counters_only: bool = False,
) -> str:
    """The text; ends with a line break. Metrics without a value are left out, and with ``counters_only`` all gauges."""
    families = [*(pod_families(sample) if sample else []), *node_families(node), *rank_families(ranks)]
    common = asdict(labels)
    return "".join(
        text_of(family, common) for family in families if family.lines and not (counters_only and family.kind == GAUGE)
    )


def pod_families(sample: Sample) -> Iterator[Family]:
    """What was sampled: devices and host."""
    devices, host = sample.devices, sample.host
    yield each_device(devices, "busy_ratio", "Share of the time in which any kernel ran.", lambda gpu: gpu.busy)
    yield each_device(devices, "sm_active_ratio", "Share of multiprocessors with work.", lambda gpu: gpu.sm_active)
    yield each_device(devices, "memory_used_bytes", "Device memory in use.", lambda gpu: gpu.memory_used_bytes)
    yield each_device(devices, "memory_limit_bytes", "Device memory.", lambda gpu: gpu.memory_limit_bytes)
    yield each_device(devices, "power_watts", "Power drawn.", lambda gpu: gpu.power_watts)
    yield each_device(devices, "temperature_celsius", "Temperature.", lambda gpu: gpu.temperature_celsius)
    yield each_device(devices, "sm_clock_hertz", "Clock of the multiprocessors.", lambda gpu: gpu.sm_clock_hertz)
    yield each_device(devices, "up", "Whether the driver answers for the device.", lambda gpu: int(gpu.up))
    io: list[Line] = [
        ("", {"gpu_uuid": gpu.uuid, "link": link, "direction": direction}, value)
        for gpu in devices
        for (link, direction), value in gpu.io_bytes.items()
    ]
    yield Family("gpu_io_bytes_total", COUNTER, "Bytes by link and direction, as the device sees it.", io)
    names: list[Line] = [("", {"gpu_uuid": gpu.uuid, "index": gpu.index, "name": gpu.name}, 1.0) for gpu in devices]
    yield Family("gpu_info", GAUGE, "Names of the devices; always 1.", names)
    waited, throttled = host.cpu_wait_seconds, host.throttled_seconds
    yield one("cpu_wait_seconds_total", COUNTER, "Seconds for which processes waited for a processor.", waited)
    yield one("cpu_throttled_seconds_total", COUNTER, "Seconds for which the CPU quota stopped the pod.", throttled)
    yield one("memory_used_bytes", GAUGE, "Memory of the pod in use.", host.memory_used_bytes)
    yield one("memory_limit_bytes", GAUGE, "Memory that the pod may use.", host.memory_limit_bytes)


def node_families(node: NodeTotals) -> Iterator[Family]:
    """What the attempt has used on this node."""
    energy: list[Line] = [("", {"gpu_uuid": uuid}, joules) for uuid, joules in node.energy_joules.items()]
    yield Family("gpu_energy_joules_total", COUNTER, "Energy used in this attempt.", energy)
    throttled: list[Line] = [
        ("", {"gpu_uuid": uuid, "reason": reason}, seconds)
        for uuid, reasons in node.throttled_seconds.items()
        for reason, seconds in reasons.items()
    ]
    yield Family("gpu_throttled_seconds_total", COUNTER, "Seconds clocked down, by reason.", throttled)
    held = node.gpu_seconds or None
    yield one("gpu_seconds_total", COUNTER, "Seconds for which the attempt held devices, summed over them.", held)
    dollars: list[Line] = [("", {"price": name}, spent) for name, spent in node.cost_dollars.items()]
    yield Family("cost_dollars_total", COUNTER, "Dollars for this node's time in this attempt, by price.", dollars)


def rank_families(ranks: Sequence[RankTotals]) -> Iterator[Family]:
    """What the ranks on this node have done."""
    phases: list[Line] = [
        ("", {"phase": phase, **names(rank)}, seconds)
        for rank in ranks
        for phase, seconds in rank.phase_seconds.items()
    ]
    yield Family("phase_seconds_total", COUNTER, "Seconds of training by phase.", phases)
    yield each_rank(ranks, "steps_total", COUNTER, "Steps done.", lambda rank: rank.steps)
    yield each_rank(ranks, "samples_total", COUNTER, "Samples trained on.", lambda rank: rank.samples)
    steps = [line for rank in ranks for line in histogram(rank)]
    yield Family("step_seconds", HISTOGRAM, "Seconds that a step takes.", steps)
    last = each_rank(ranks, "last_step_timestamp_seconds", GAUGE, "When the last step ended.", lambda r: r.last_step_at)
    yield last
    goodput: list[Line] = [("", {}, rank.goodput) for rank in ranks if rank.goodput is not None]
    yield Family("goodput_ratio", GAUGE, "Share of the training's time that is useful in the end.", goodput)
    causes: list[Line] = [("", {"cause": cause}, share) for rank in ranks for cause, share in rank.bottlenecks.items()]
    yield Family("bottleneck_ratio", GAUGE, "Share of the training's time that would go with a cause.", causes)


def histogram(rank: RankTotals) -> Iterator[Line]:
    for bound, steps in zip(STEP_BOUNDS, rank.steps_within, strict=True):
        yield "_bucket", {"le": str(bound), **names(rank)}, steps
    yield "_bucket", {"le": "+Inf", **names(rank)}, rank.steps
    yield "_sum", names(rank), sum(rank.phase_seconds.get(phase, 0.0) for phase in STEP)
    yield "_count", names(rank), rank.steps


def names(rank: RankTotals) -> dict[str, object]:
    return {"rank": rank.rank, **({"gpu_uuid": rank.gpu_uuid} if rank.gpu_uuid else {})}


def each_device(
    devices: Iterable[DeviceReading], name: str, help: str, value_of: Callable[[DeviceReading], float | None]
) -> Family:
    values = ((device.uuid, value_of(device)) for device in devices)
    lines: list[Line] = [("", {"gpu_uuid": uuid}, value) for uuid, value in values if value is not None]
    return Family(f"gpu_{name}", GAUGE, help, lines)


def each_rank(
    ranks: Iterable[RankTotals], name: str, kind: str, help: str, value_of: Callable[[RankTotals], float]
) -> Family:
    return Family(name, kind, help, [("", names(rank), value_of(rank)) for rank in ranks])


def one(name: str, kind: str, help: str, value: float | None) -> Family:
    return Family(name, kind, help, [] if value is None else [("", {}, value)])


def text_of(family: Family, common: dict[str, object]) -> str:
    name = PREFIX + family.name
    lines = (f"{name}{suffix}{{{label_text(common | own)}}} {value!r}\n" for suffix, own, value in family.lines)
    return f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n{''.join(lines)}"


def label_text(labels: dict[str, object]) -> str:
    return ",".join(f'{name}="{escaped(str(value))}"' for name, value in labels.items())


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
