"""Figures of a report that no stage records itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile

from slipstream.shared.cron import times_after, utc


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
    #: Sentence about the learned answers of conversations; "" for other data.
    answers: str = ""
    #: Sentences about splits that were drawn because only others are given.
    drawn: list[str] = field(default_factory=list)


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

    Flyte silently skips these times. The run can name them when it ends, without state between runs.
    """
    return list(takewhile(lambda time: time <= utc(ended), times_after(cron, utc(kickoff))))


def format_minute(time: datetime) -> str:
    return f"{utc(time):%Y-%m-%d %H:%M}"
