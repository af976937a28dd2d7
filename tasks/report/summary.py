"""What a workflow returns: ``pyflyte run`` prints it after everything else."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile

from croniter import croniter

from tasks.report import terminal_summary
from tasks.report.figures import DataRunFigures, RunFigures


@dataclass(frozen=True)
class RunSummary(RunFigures):
    """The figures of a whole run. ``str`` gives the summary for the terminal."""

    def __str__(self) -> str:
        return terminal_summary.of_run(self)


@dataclass(frozen=True)
class DataSummary(DataRunFigures):
    """The figures of a run that only prepares. ``str`` gives the summary for the terminal."""

    def __str__(self) -> str:
        return terminal_summary.of_data(self)


@dataclass(frozen=True)
class NightSummary:
    """A run that a schedule started. ``str`` gives the summary for the terminal."""

    run: RunSummary
    #: When it was to start and when it ended, and the runs that were skipped meanwhile (UTC, to the minute).
    kickoff: str
    ended: str
    skipped: list[str]

    @classmethod
    def of(cls, run: RunSummary, cron: str, kickoff: datetime, ended: datetime) -> NightSummary:
        """The night that the schedule ``cron`` started for ``kickoff``."""
        skipped = [minute(time) for time in skipped_nights(cron, kickoff, ended)]
        return cls(run, minute(kickoff), minute(ended), skipped)

    def __str__(self) -> str:
        return terminal_summary.of_night(self.run, self.kickoff, self.ended, self.skipped)


def skipped_nights(cron: str, kickoff: datetime, ended: datetime) -> list[datetime]:
    """The times at which ``cron`` fired after ``kickoff``, for which a run was started, until that run ended.

    Flyte skips them without a word, because that run is still going: so it can name them itself when it ends, and
    nothing has to be remembered from one run to the next.
    """
    times = croniter(cron, utc(kickoff), ret_type=datetime)
    return list(takewhile(lambda time: time <= utc(ended), iter(times.get_next, None)))


def utc(time: datetime) -> datetime:
    """A time without a zone is one of UTC, as Flyte's are."""
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def minute(time: datetime) -> str:
    return f"{utc(time):%Y-%m-%d %H:%M}"
