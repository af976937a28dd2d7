"""The figures of a run that no stage has written down by itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile

from slipstream.cron import times_after


@dataclass(frozen=True)
class DataFigures:
    """The data: where it came from, the target, and rows by what became of them."""

    source: str
    target: str
    #: "classification", "regression" or "next token".
    task: str
    #: Of a classification; else 0.
    classes: int
    rows_read: int
    rows_kept: int
    rows_quarantined: int
    rows_train: int
    rows_validation: int
    rows_test: int
    #: What a row is: of text a document.
    unit: str = "row"
    #: Of the training split of text.
    tokens: int = 0


@dataclass(frozen=True)
class Quarantined:
    """Rows set aside for one reason: how many, and where the first of them was."""

    reason: str
    column: str
    rows: int
    file: str
    line: int


@dataclass(frozen=True)
class NetworkFigures:
    """The interconnect, by the conventions of nccl-tests. The all_reduce figures are None if it was not measured.

    The profile itself, with the times of all iterations, is too large for what a workflow returns.
    """

    #: Processes, nodes, "gloo" or "nccl", and the device.
    world: int
    nodes: int
    backend: str
    device: str
    #: Median microseconds at the smallest size, which is given in bytes.
    all_reduce_latency_us: float | None
    all_reduce_latency_bytes: int | None
    #: Bus bandwidth in 1e9 bytes a second at the largest size, which is given in bytes. 0 for one process.
    all_reduce_busbw_gbps: float | None
    all_reduce_busbw_bytes: int | None
    #: Seconds since 1970, UTC: it may be the profile of an earlier run on the same hardware.
    measured_at: float
    #: What is slow, and other things that somebody should look at.
    findings: list[str]
    #: Whether only the collectives of training were measured, at few sizes.
    short: bool = False


@dataclass(frozen=True)
class ScheduleFigures:
    """A run that a schedule started. Times are UTC, to the minute."""

    kickoff: str
    #: When its report was made.
    ended: str
    #: The later times of the schedule at which nothing was started, because this run was still going.
    skipped: list[str]


def schedule_figures(cron: str, kickoff: datetime, ended: datetime) -> ScheduleFigures:
    """The run that the schedule ``cron`` started for ``kickoff``."""
    return ScheduleFigures(
        minute(kickoff), minute(ended), [minute(time) for time in skipped_runs(cron, kickoff, ended)]
    )


def skipped_runs(cron: str, kickoff: datetime, ended: datetime) -> list[datetime]:
    """The times at which ``cron`` fired after ``kickoff``, for which a run was started, until that run ended.

    Flyte skips them without a word, because that run is still going: so it can name them itself when it ends, and
    nothing has to be remembered from one run to the next.
    """
    return list(takewhile(lambda time: time <= utc(ended), times_after(cron, utc(kickoff))))


def utc(time: datetime) -> datetime:
    """A time without a zone is one of UTC, as Flyte's are."""
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def minute(time: datetime) -> str:
    return f"{utc(time):%Y-%m-%d %H:%M}"
