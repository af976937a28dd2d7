"""Text page about a stage's pod: devices, host, ranks and bottlenecks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.errors import one_line
from slipstream.shared.formatting import UNKNOWN, age, aligned_table, percent, size_text
from slipstream.shared.telemetry.bottleneck import DECISIVE, decisive_causes
from slipstream.shared.telemetry.metrics import STEP
from slipstream.shared.telemetry.node import NodeFacts, read_facts
from slipstream.shared.telemetry.records import CHECKPOINT, EVALUATION, DeviceReading, RankTotals, Sample
from slipstream.shared.telemetry.ring import SILENT_S, latest_samples
from slipstream.shared.telemetry.totals import read_totals

#: Number of samples over which the host's usage is averaged.
SAMPLES = 6
DEVICES = ("device", "utilisation", "SM activity", "memory", "power", "temperature", "state")
HOST = ("host", "CPUs used", "threads waiting for a CPU", "throttled by the quota", "memory")
RANKS = ("rank", "steps", "samples/s", "ms/step", *STEP, EVALUATION, CHECKPOINT, "last step")
CAUSES = ("cause", "share", "")
#: Left-aligned columns.
WORDS = ("device", "state", "host", "cause", "")
#: See docs/telemetry.md.
UTILISATION = "utilisation: any kernel ran, including kernels that wait for other ranks"


@dataclass(frozen=True)
class TelemetrySnapshot:
    """Contents of a sample directory, with at least one sample; ``now`` is seconds since 1970, UTC."""

    name: str
    samples: Sequence[Sample]
    ranks: Sequence[RankTotals]
    facts: NodeFacts | None
    now: float

    @classmethod
    def of(cls, directory: Path, now: float) -> TelemetrySnapshot:
        return cls(
            directory.name, latest_samples(directory, SAMPLES), read_totals(directory), read_facts(directory), now
        )

    @property
    def silent_s(self) -> float:
        return max(0.0, self.now - self.samples[-1].at)

    @property
    def has_ended(self) -> bool:
        return self.silent_s > SILENT_S


def page_lines(shown: TelemetrySnapshot, width: int | None = None) -> list[str]:
    """Return the lines of the page; table columns beyond ``width`` continue below."""
    parts = [[head(shown)], devices_lines(shown, width), host_lines(shown, width)]
    parts += [ranks_lines(shown, width), cause_lines(shown.ranks, width)]
    return [line for part in parts if part for line in ("", *part)][1:]


def head(shown: TelemetrySnapshot) -> str:
    ago = age(shown.silent_s)
    when = f"ended {ago} ago" if shown.has_ended else f"sampled {ago} ago"
    return one_line(f"{shown.name}{where(shown.facts)}: {when}")


def where(facts: NodeFacts | None) -> str:
    if facts is None:
        return ""
    spot = " on spot" if facts.spot else ""
    beside = f" ({facts.instance_type}{spot})" if facts.instance_type else spot
    return f" on {facts.node}{beside}"


def devices_lines(shown: TelemetrySnapshot, width: int | None) -> list[str]:
    devices = shown.samples[-1].devices
    if not devices:
        return []
    return [*table(DEVICES, [device_row(device) for device in devices], width), f"({UTILISATION})"]


def device_row(device: DeviceReading) -> list[str]:
    throttled = ", ".join(reason.replace("_", " ") for reason in device.throttled)
    state = f"throttled: {throttled}" if throttled else "ok"
    return [
        f"{device.index} {device.name}",
        percent(device.busy, 0),
        percent(device.sm_active, 0),
        memory(device.memory_used_bytes, device.memory_limit_bytes),
        UNKNOWN if device.power_watts is None else f"{device.power_watts:.0f} W",
        UNKNOWN if device.temperature_celsius is None else f"{device.temperature_celsius:.0f} °C",
        state if device.up else "not answering",
    ]


def host_lines(shown: TelemetrySnapshot, width: int | None) -> list[str]:
    """Return the host's usage over the last samples; "-" with a single sample."""
    first, last = shown.samples[0], shown.samples[-1]
    passed, before, host = last.at - first.at, first.host, last.host
    used = waiting = UNKNOWN
    if passed > 0:
        used = f"{max(0.0, host.cpu_seconds - before.cpu_seconds) / passed:.2f}"
        waiting = f"{max(0.0, host.cpu_wait_seconds - before.cpu_wait_seconds) / passed:.2f}"
    periods = host.periods - before.periods
    stopped = (host.throttled_periods - before.throttled_periods) / periods if periods > 0 else None
    quota = UNKNOWN if stopped is None else f"{percent(stopped, 0)} of its periods"
    memory_used = memory(host.memory_used_bytes, host.memory_limit_bytes)
    return table(HOST, [["CPU and memory", f"{used} of {host.cpus:g}", waiting, quota, memory_used]], width)


def ranks_lines(shown: TelemetrySnapshot, width: int | None) -> list[str]:
    rows = [rank_row(rank, shown.now) for rank in shown.ranks]
    return table(RANKS, rows, width) if rows else []


def rank_row(rank: RankTotals, now: float) -> list[str]:
    """Return a rank's figures since the start of the attempt.

    Percentages are of the time of steps, evaluations and checkpoints.
    """
    seconds = rank.phase_seconds
    steps_s = sum(seconds.get(phase, 0.0) for phase in STEP)
    whole = steps_s + sum(seconds.get(phase, 0.0) for phase in (EVALUATION, CHECKPOINT))
    begun = rank.steps > 0 and steps_s > 0

    def share(phase: str) -> str:
        return percent(seconds.get(phase, 0.0) / whole if whole > 0 else None, 0)

    return [
        f"{rank.rank:g}",
        f"{rank.steps:,.0f}",
        f"{rank.samples / steps_s:,.0f}" if begun else UNKNOWN,
        f"{1e3 * steps_s / rank.steps:.3g}" if begun else UNKNOWN,
        *(
            f"{1e3 * seconds.get(phase, 0.0) / rank.steps:.3g} ms {share(phase)}" if begun else UNKNOWN
            for phase in STEP
        ),
        *(f"{seconds.get(phase, 0.0):.3g} s {share(phase)}" for phase in (EVALUATION, CHECKPOINT)),
        f"{age(now - rank.last_step_at)} ago" if rank.last_step_at else UNKNOWN,
    ]


def cause_lines(ranks: Sequence[RankTotals], width: int | None) -> list[str]:
    """Return rank 0's bottlenecks; empty in pods without rank 0 and before the first analysis."""
    known = next((rank for rank in ranks if rank.goodput is not None), None)
    if known is None:
        return []
    verdict, also = decisive_causes(known.bottlenecks)
    notes = {verdict: "main bottleneck", **dict.fromkeys(also, "worth a look")}
    said = f"bottleneck: {verdict}" if verdict else f"no cause took {percent(DECISIVE, 0)} of the training's time"
    ordered = sorted(known.bottlenecks.items(), key=lambda item: -item[1])
    rows = [[cause, percent(share, 0), notes.get(cause, "")] for cause, share in ordered]
    lines = [one_line(f"goodput {percent(known.goodput, 0)}; {said}")]
    return [*lines, *table(CAUSES, rows, width)] if rows else lines


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    return aligned_table(columns, rows, WORDS, width).split("\n")


def memory(used: float | None, limit: float | None) -> str:
    if used is None or not limit:
        return UNKNOWN if used is None else size_text(used)
    return f"{size_text(used)} of {size_text(limit)}, {percent(used / limit, 0)}"
