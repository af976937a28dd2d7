"""``slipstream telemetry``: live view of a stage's devices, host, ranks and bottlenecks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from slipstream.shared.artifacts.format import in_run
from slipstream.shared.artifacts.results.training import KIND as TRAINED
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.artifacts.workspaces import STORE
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import UNKNOWN, age, aligned_table, percent, size_text
from slipstream.shared.one_line import one_line
from slipstream.shared.telemetry.bottleneck import DECISIVE, decisive_causes
from slipstream.shared.telemetry.metrics import STEP_PHASES
from slipstream.shared.telemetry.node import NodeFacts, read_facts
from slipstream.shared.telemetry.records import CHECKPOINT, EVALUATION, DeviceReading, RankTotals, Sample
from slipstream.shared.telemetry.ring import SILENT_S, latest_samples, newest_sample
from slipstream.shared.telemetry.totals import read_totals
from slipstream.shared.telemetry.watch import SAMPLES

REFRESH_S = 1.0
#: Terminal codes: move to the upper left corner, clear to the end of the line, clear to the end of the screen.
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True)
class StageSamples:
    """Sample directory of a stage; ``at`` is the time of its last sample, seconds since 1970, UTC."""

    directory: Path
    at: float


def stages_in(directory: Path) -> list[StageSamples]:
    """Return the stages with samples, newest first.

    These are ``directory`` itself if it has samples, else its subdirectories. Raises ``UserError`` if none has samples.
    """
    expected = "expected one stage's samples, or a directory of such: .slipstream/telemetry where a workflow was run"
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {what}; {expected}")
    own = newest_sample(directory)
    if own:
        return [StageSamples(directory, own.at)]
    try:
        below = [path for path in directory.iterdir() if path.is_dir()]
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}; {expected}") from None
    found = [StageSamples(path, sample.at) for path in below if (sample := newest_sample(path))]
    if not found:
        raise UserError(f"{directory} has no samples; {expected}")
    return sorted(found, key=lambda stage: -stage.at)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=STORE / SAMPLES)
def main(directory: Path) -> None:
    """Show devices, host, ranks and bottlenecks of a stage.

    On a terminal the page is refreshed every second until the stage has ended; otherwise it is printed once.

    DIRECTORY holds the samples of one stage, or of several stages; the newest is shown. The default is
    .slipstream/telemetry, where workflows on this machine write. Of a run's directory (runs/…) the diagnosis is shown.
    In a pod the samples lie in the task's working directory, whose name only Flyte knows; find it with kubectl exec -it
    POD -- sh -c and the example in quotes.

    Example: slipstream telemetry /tmp/flyte*/sandbox/local_flytekit/*/telemetry
    """
    if sentence := ended_training(directory):
        click.echo(sentence)
        return
    stage, *others = stages_in(directory)
    if sys.stdout.isatty():
        follow_stage(stage, others)
        return
    shown = look_at(stage)
    click.echo("\n".join([*page_lines(shown), *listed(others, shown.now)]))


def ended_training(run: Path) -> str:
    """Return what is left of a run's telemetry, for a directory ``runs/…``; "" for others."""
    trained = in_run(run, TRAINED)
    if trained == run:
        return ""
    found = read_attempt(trained).bottleneck
    said = f": {found.sentence}" if found else ""
    return one_line(f"{run}: the training has ended{said}. Its devices are in {run / 'report.html'}.")


def follow_stage(stage: StageSamples, others: Sequence[StageSamples]) -> None:
    """Redraw the stage's page in place until the stage has ended, or until Ctrl-C."""
    try:
        while not draw_page(stage, others):
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        click.echo()


def draw_page(stage: StageSamples, others: Sequence[StageSamples]) -> bool:
    """Draw the current page and return True if the stage has ended.

    A running stage's page is cut to the terminal's size, so that it does not scroll.
    """
    shown, size = look_at(stage), shutil.get_terminal_size()
    lines = [*page_lines(shown, size.columns), *listed(others, shown.now)]
    if not shown.has_ended:
        lines = [line[: size.columns] for line in lines[: size.lines - 1]]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()
    return shown.has_ended


def look_at(stage: StageSamples) -> TelemetrySnapshot:
    """Return a current snapshot.

    Raises ``UserError`` if the samples were removed meanwhile.
    """
    shown = TelemetrySnapshot.of(stage.directory, time.time())
    if not shown.samples:
        raise UserError(f"{stage.directory} has no samples any more, as only those of the last runs are kept")
    return shown


def listed(others: Sequence[StageSamples], now: float) -> list[str]:
    names = [f"  {one_line(stage.directory.name)}  {age(now - stage.at)} ago" for stage in others]
    return ["", "older:", *names] if names else []


#: Number of samples over which the host's usage is averaged.
SHOWN_SAMPLES = 6
DEVICES = ("device", "utilisation", "SM activity", "memory", "power", "temperature", "state")
HOST = ("host", "CPUs used", "threads waiting for a CPU", "throttled by the quota", "memory")
RANKS = ("rank", "steps", "samples/s", "ms/step", *STEP_PHASES, EVALUATION, CHECKPOINT, "last step")
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
            directory.name, latest_samples(directory, SHOWN_SAMPLES), read_totals(directory), read_facts(directory), now
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
    steps_s = sum(seconds.get(phase, 0.0) for phase in STEP_PHASES)
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
            for phase in STEP_PHASES
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
    useful = f"goodput {percent(known.goodput, 0)}; " if known.attempt > 1 else ""
    lines = [one_line(useful + said)]
    return [*lines, *table(CAUSES, rows, width)] if rows else lines


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    return aligned_table(columns, rows, WORDS, width).split("\n")


def memory(used: float | None, limit: float | None) -> str:
    if used is None or not limit:
        return UNKNOWN if used is None else size_text(used)
    return f"{size_text(used)} of {size_text(limit)}, {percent(used / limit, 0)}"
