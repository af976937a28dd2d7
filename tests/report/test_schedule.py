"""The report of a scheduled run: later runs that were skipped because it was still running."""

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from slipstream.pipeline.report.engine import build_report
from slipstream.pipeline.report.figures import schedule_figures, skipped_runs
from tests.support.report_pages import Parsed
from tests.support.report_runs import STAGES, results

KICKOFF = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("hours", "days"), [(0.0, []), (3.5, []), (23.99, []), (24.0, [23]), (47.99, [23]), (50.0, [23, 24])]
)
def test_every_later_time_until_the_end_was_skipped(hours: float, days: list[int]) -> None:
    skipped = skipped_runs("0 2 * * *", KICKOFF, KICKOFF + timedelta(hours=hours))
    assert skipped == [datetime(2026, 11, day, 2, 0, tzinfo=UTC) for day in days]


def test_times_are_utc_whatever_the_zone_of_the_pod() -> None:
    elsewhere = timezone(timedelta(hours=9))
    ended = KICKOFF + timedelta(hours=25)
    expected = [KICKOFF + timedelta(hours=24)]
    assert skipped_runs("0 2 * * *", KICKOFF.astimezone(elsewhere), ended.astimezone(elsewhere)) == expected
    assert skipped_runs("0 2 * * *", KICKOFF.replace(tzinfo=None), ended.replace(tzinfo=None)) == expected


def schedule_of(directory: Path, hours: int) -> tuple[str, str, list[str]]:
    """Return the page's last section, the terminal's text and the figures for a run of ``hours`` hours."""
    schedule = schedule_figures("0 2 * * *", KICKOFF, KICKOFF + timedelta(hours=hours))
    summary = build_report(directory / "runs", results(directory / "in", ["no", "yes"]), STAGES, {}, schedule)
    run = Path(summary.directory)
    page = " ".join(Parsed((run / summary.report).read_text(encoding="utf-8")).text.split())
    return page, str(summary), json.loads((run / "summary.json").read_text())["schedule"]["skipped"]


def test_page_terminal_and_figures_name_them(tmp_path: Path) -> None:
    page, terminal, skipped = schedule_of(tmp_path, hours=50)
    assert skipped == ["2026-11-23 02:00", "2026-11-24 02:00"]
    assert "Skipped, because this run was still in progress: 2026-11-23 02:00, 2026-11-24 02:00." in page
    assert "Skipped     2026-11-23 02:00, 2026-11-24 02:00" in terminal.splitlines()


def test_a_short_run_skips_none_and_says_so(tmp_path: Path) -> None:
    page, terminal, skipped = schedule_of(tmp_path, hours=3)
    assert skipped == []
    assert "started this run for 2026-11-22 02:00, and it ended 2026-11-22 05:00 (UTC). No other run was due" in page
    assert "Scheduled   for 2026-11-22 02:00, ended 2026-11-22 05:00 (UTC)" in terminal.splitlines()
    assert "Skipped     none: " in terminal
