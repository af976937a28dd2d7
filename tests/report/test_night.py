"""The report of a scheduled run: the nights that it was in the way of."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from tasks.report.summary import NightSummary, skipped_nights
from tasks.report.summary_builder import run_summary
from tasks.report.task import report_night
from tests.support.report_runs import STAGES, results

KICKOFF = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("hours", "days"),
    [(0.0, []), (3.5, []), (23.99, []), (24.0, [23]), (47.99, [23]), (50.0, [23, 24])],
)
def test_every_later_time_until_the_end_was_skipped(hours: float, days: list[int]) -> None:
    skipped = skipped_nights("0 2 * * *", KICKOFF, KICKOFF + timedelta(hours=hours))
    assert skipped == [datetime(2026, 11, day, 2, 0, tzinfo=UTC) for day in days]


def test_times_are_utc_whatever_the_zone_of_the_pod() -> None:
    elsewhere = timezone(timedelta(hours=9))
    ended = KICKOFF + timedelta(hours=25)
    expected = [KICKOFF + timedelta(hours=24)]
    assert skipped_nights("0 2 * * *", KICKOFF.astimezone(elsewhere), ended.astimezone(elsewhere)) == expected
    assert skipped_nights("0 2 * * *", KICKOFF.replace(tzinfo=None), ended.replace(tzinfo=None)) == expected


def test_the_report_of_the_night_names_them(tmp_path: Path) -> None:
    run = run_summary(results(tmp_path, ["no", "yes"]), STAGES, "runs/2026-11-22T03-04-05")
    long, short = (NightSummary.of(run, "0 2 * * *", KICKOFF, KICKOFF + timedelta(hours=hours)) for hours in (50, 3))
    assert str(long).startswith(str(run))
    assert "Skipped     2026-11-23 02:00, 2026-11-24 02:00" in str(long).splitlines()
    assert "Scheduled   for 2026-11-22 02:00, ended 2026-11-22 05:00 (UTC)" in str(short).splitlines()
    assert "Skipped     none: " in str(short)


def test_its_task_ends_the_night(tmp_path: Path) -> None:
    run = run_summary(results(tmp_path, ["no", "yes"]), STAGES, "runs/2026-11-22T03-04-05")
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    night = report_night(summary=run, cron="0 0 * * *", kickoff=today - timedelta(days=2))
    assert night.run == run
    assert night.skipped[:2] == [f"{today - timedelta(days=days):%Y-%m-%d} 00:00" for days in (1, 0)]
