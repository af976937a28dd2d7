"""Formatting of figures as short texts.

Functions take values in the units of the summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, takewhile
from typing import Any

from slipstream.shared.artifacts.results.export import NO_LIMIT
from slipstream.shared.cron import times_after

UNKNOWN = "—"
LABEL_LETTERS = 14
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def count(number: int) -> str:
    return f"{number:,}"


def count_with_noun(number: int, noun: str) -> str:
    """Return a number with its noun: 1 thread, 2,000 threads, 2 processes."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{count(number)} {noun if number == 1 else plural}"


def rows(number: int) -> str:
    return count_with_noun(number, "row")


def percent(share: float | None) -> str:
    """Return a share of 1 in percent: 98.89 % for 0.98888."""
    return UNKNOWN if share is None else f"{100 * share:.2f} %"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with significant digits, without an exponent if readable: 0.0123, 1.23, 123, 12,345, 1.2e-07."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def value(number: float) -> str:
    """Return a data value: integers below ten million in full, others to four digits."""
    if not abs(number) < 1e7:
        return f"{number:.4g}"
    return count(int(number)) if number == int(number) else significant(number, 4)


def moment(seconds: float) -> str:
    """Return seconds since 1970 (UTC) as a date, with the time unless it is midnight: 2026-01-02 03:04."""
    try:
        time = EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return value(seconds)
    return f"{time:%Y-%m-%d}" if (time.hour, time.minute) == (0, 0) else f"{time:%Y-%m-%d %H:%M}"


def days(seconds: float) -> str:
    return f"{significant(seconds / 86_400)} days"


def age(measured_at: float) -> str:
    """Return the time since ``measured_at``, or "" below half an hour: 0.5 hours, 3.2 days."""
    hours = (datetime.now(UTC).timestamp() - measured_at) / 3600
    if hours < 0.5:
        return ""
    return f"{hours:.1f} hours" if hours < 24 else f"{hours / 24:.1f} days"


def column_figure(column: Mapping[str, Any], name: str) -> str:
    """Return a figure of a data card's column in its unit, or "" if the card lacks it."""
    if name not in column:
        return ""
    if column["type"] == "time":
        return days(column[name]) if name == "std" else moment(column[name])
    return value(column[name])


def size(number: int | None) -> str:
    """Return the bytes of a file in decimal units: 84.3 KB."""
    return UNKNOWN if number is None else scaled(number, 1000, ("B", "KB", "MB", "GB", "TB"))


def message_size(number: int) -> str:
    """Return the size of a message in binary units, as message sizes are powers of two: 16 MiB."""
    return scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def flops(number: float) -> str:
    return scaled(number, 1000, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def scaled(number: float, step: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(number) >= step and power < len(names) - 1:
        number /= step
        power += 1
    return f"{number:.0f} {names[power]}" if number == int(number) else f"{significant(number)} {names[power]}"


def milliseconds(value: float | None) -> str:
    """Return a latency, in microseconds below one millisecond: 61.2 µs."""
    return UNKNOWN if value is None else microseconds(value * 1000)


def microseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 1000:
        return f"{significant(value)} µs"
    return f"{significant(value / 1000)} ms" if value < 1e6 else f"{significant(value / 1e6)} s"


def seconds(value: float) -> str:
    """Return a wall-clock time: 0.4 s, 12.3 s, 2 min 5 s, 1 h 4 min."""
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def dollars(value: float | None) -> str:
    return UNKNOWN if value is None else f"${value:,.2f}"


def energy(watt_hours: float | None) -> str:
    if watt_hours is None:
        return UNKNOWN
    return f"{significant(watt_hours)} Wh" if watt_hours < 1000 else f"{significant(watt_hours / 1000)} kWh"


def bandwidth(value: float | None) -> str:
    """Return a bandwidth in 1e9 bytes per second: 12.3 GB/s."""
    return UNKNOWN if value is None else f"{significant(value)} GB/s"


def metric(name: str, value: float | None) -> str:
    """Return a metric's value: shares in percent, others in their unit."""
    if value is None:
        return UNKNOWN
    return percent(value) if name in SHARES else significant(value, 4)


def limit(value: float, digits: int = 2) -> str:
    """Return a limit in percent or points: 0.71; "no limit" from :data:`NO_LIMIT` on."""
    return "no limit" if abs(value) >= NO_LIMIT else f"{value:.{digits}f}"


def limits(low: float, high: float, digits: int = 2) -> str:
    """Return an interval: -0.30 to 0.71."""
    return f"{limit(low, digits)} to {limit(high, digits)}"


def with_limits(value: float, low: float, high: float) -> str:
    """Return a figure with its limits: 0.12 (-0.30 to 0.71)."""
    return f"{value:.2f} ({limits(low, high)})"


def units(layers: Sequence[int]) -> str:
    """Return the units of every layer, with equal neighbours merged: 512, 256, 4 x 64."""
    runs = [(width, len(list(same))) for width, same in groupby(layers)]
    return ", ".join(str(width) if times == 1 else f"{times} x {width}" for width, times in runs)


def shorten_label(label: str) -> str:
    """Return a name from the data on one line, in at most ``LABEL_LETTERS`` characters."""
    line = " ".join(label.split())
    return line if len(line) <= LABEL_LETTERS else f"{line[: LABEL_LETTERS - 1]}…"


def capitalise_sentence(text: str) -> str:
    """Capitalise ``text`` unless it starts with a variant's name, which keeps its spelling."""
    word = text.split(" ", 1)[0]
    return text if "-" in word else text[:1].upper() + text[1:]


def setting(value: object) -> str:
    """Return a configuration value on one line, as in YAML where possible."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(item) for item in value) if value else "none"
    if isinstance(value, str):
        return value if value.strip() else f'"{value}"'
    return "none" if value in ({}, None) else f"{value}"


#: Metrics that are shares of 1, and the names of all metrics.
SHARES = ("accuracy", "macro_f1", "ece")
NAMES = {
    "accuracy": "accuracy",
    "log_loss": "log loss",
    "roc_auc": "ROC AUC",
    "macro_f1": "macro F1",
    "ece": "calibration error",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "bits_per_byte": "bits per byte",
    "perplexity": "perplexity",
}
#: Metrics for which less is better.
LESS_IS_BETTER = ("log_loss", "ece", "rmse", "mae", "bits_per_byte", "perplexity")
#: Unit and decimals of a metric's difference from the baseline; percent if absent.
UNITS = {**dict.fromkeys(SHARES, ("points", 2)), "bits_per_byte": ("bits per byte", 3)}


@dataclass(frozen=True)
class DataFigures:
    source: str
    target: str
    #: "classification", "regression" or "next token".
    task: str
    #: Number of classes; 0 unless the task is classification.
    classes: int
    rows_read: int
    rows_kept: int
    rows_quarantined: int
    rows_train: int
    rows_validation: int
    rows_test: int
    #: Word for a row on pages: "row", or "document" for text data.
    unit: str = "row"
    #: Number of tokens of the training split; 0 unless the data are text.
    tokens: int = 0


@dataclass(frozen=True)
class Quarantined:
    """Number of rows quarantined for one reason, and file and line of the first row."""

    reason: str
    column: str
    rows: int
    file: str
    line: int


@dataclass(frozen=True)
class NetworkFigures:
    """Interconnect figures by the conventions of nccl-tests.

    The all_reduce figures are None if all_reduce was not measured. The whole profile, with the times of all iterations,
    is too large for a workflow's result.
    """

    #: Number of processes and nodes, "gloo" or "nccl", and the device.
    world: int
    nodes: int
    backend: str
    device: str
    #: Median microseconds at the smallest size, and that size in bytes.
    all_reduce_latency_us: float | None
    all_reduce_latency_bytes: int | None
    #: Bus bandwidth in 1e9 bytes per second at the largest size (0 for one process), and that size in bytes.
    all_reduce_busbw_gbps: float | None
    all_reduce_busbw_bytes: int | None
    #: Seconds since 1970, UTC. The profile may be of an earlier run on the same hardware.
    measured_at: float
    #: Slow links and other findings that need attention.
    findings: list[str]
    #: True if only the collectives of training were measured, at few sizes.
    short: bool = False


@dataclass(frozen=True)
class ScheduleFigures:
    """Times of a scheduled run in UTC, to the minute."""

    kickoff: str
    #: Time of the report.
    ended: str
    #: Later times of the schedule that were skipped because this run was active.
    skipped: list[str]


def schedule_figures(cron: str, kickoff: datetime, ended: datetime) -> ScheduleFigures:
    """Return the figures of the run that ``cron`` started for ``kickoff``."""
    return ScheduleFigures(
        format_minute(kickoff),
        format_minute(ended),
        [format_minute(time) for time in skipped_runs(cron, kickoff, ended)],
    )


def skipped_runs(cron: str, kickoff: datetime, ended: datetime) -> list[datetime]:
    """Return the times after ``kickoff`` at which ``cron`` fired until the run ended.

    Flyte silently skips these times because the run is active. So the run can name them when it ends, without state
    between runs.
    """
    return list(takewhile(lambda time: time <= utc(ended), times_after(cron, utc(kickoff))))


def utc(time: datetime) -> datetime:
    """Return ``time`` in UTC; a time without a zone is UTC, as in Flyte."""
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def format_minute(time: datetime) -> str:
    return f"{utc(time):%Y-%m-%d %H:%M}"
