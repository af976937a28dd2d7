"""A scheduled run: the time that it was started for, and the later times of the schedule that were skipped for it."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import takewhile

from slipstream.cron import times_after
from slipstream.report.figures import ScheduleFigures


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
