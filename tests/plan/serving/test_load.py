"""Recorded requests: hourly rates, counts of intervals, idle periods, and invalid records."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from slipstream.operations.plan.serving.load import MONTH_S, read_load
from slipstream.shared.errors import UserError
from tests.support.wording import refuses

BEGIN = datetime(2026, 11, 2)
HOURLY = "time,requests\n" + "".join(f"2026-11-02T{hour:02}:00,{3600 * (hour + 1)}\n" for hour in range(24))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def log(path: Path, seconds: Iterable[float]) -> Path:
    """A line for each request."""
    lines = (f"{(BEGIN + timedelta(seconds=float(at))).isoformat()}\n" for at in seconds)
    return written(path, "time\n" + "".join(lines))


def test_counts_of_each_hour_are_rates_of_the_hour(tmp_path: Path) -> None:
    load = read_load(written(tmp_path / "load.csv", HOURLY))
    assert load.rates == tuple(range(1, 25)) and load.seconds == 86_400 and load.idle == ()
    assert load.month == pytest.approx(3600 * 300 / 86_400 * MONTH_S)
    assert load.arrivals.length == 3600 and list(load.arrivals.requests) == [3600 * rate for rate in load.rates]


def test_the_busiest_minute_of_all_days_counts(tmp_path: Path) -> None:
    """Of a log: a request each 10 s for two days, and 60 within a minute of the second day."""
    each = [10.0 * index for index in range(2 * 8640)]
    burst = [86_400.0 + 9 * 3600 + 300 + index for index in range(60)]
    load = read_load(log(tmp_path / "load.csv", sorted(each + burst)))
    assert load.rates[9] == pytest.approx(66 / 60)
    assert {rate for hour, rate in enumerate(load.rates) if hour != 9} == {0.1}
    assert load.month == pytest.approx((2 * 8640 + 60) / 2 / 86_400 * MONTH_S)


def test_a_log_of_whole_minutes_says_nothing_of_seconds(tmp_path: Path) -> None:
    load = read_load(log(tmp_path / "load.csv", np.repeat(np.arange(0, 86_400, 60), 30)))
    assert load.arrivals.length == 60 and set(load.arrivals.requests) == {30} and set(load.rates) == {0.5}


@pytest.mark.parametrize("length", [3, 60])
def test_counts_are_kept_at_the_resolution_of_the_recording(tmp_path: Path, length: int) -> None:
    counts = np.tile([0, 12], 86_400 // length // 2)
    lines = (f"{(BEGIN + timedelta(seconds=length * index)).isoformat()},{each}" for index, each in enumerate(counts))
    arrivals = read_load(written(tmp_path / "load.csv", "\n".join(["time,requests", *lines]))).arrivals
    assert arrivals.length == length and set(arrivals.requests) == {12}
    assert list(np.unique(arrivals.gaps[:-1])) == [2 * length] and len(arrivals.at) == 43_200 // length


def test_missing_intervals_had_no_requests(tmp_path: Path) -> None:
    lines = HOURLY.splitlines(keepends=True)
    load = read_load(written(tmp_path / "load.csv", "".join([*lines[:3], *lines[6:8], *lines[9:]])))
    assert load.idle == (3 * 3600.0, 3600.0) and load.rates[2:5] == (0.0, 0.0, 0.0) and load.rates[7] == 0.0
    assert load.idle_share == pytest.approx(4 / 24)


def test_rows_of_the_same_time_are_added_in_any_order(tmp_path: Path) -> None:
    """As of several servers; other columns are passed over."""
    header, *lines = HOURLY.splitlines()
    text = "\n".join([f"{header},pod", *(f"{line},a" for line in lines), *(f"{line},b" for line in reversed(lines))])
    assert read_load(written(tmp_path / "load.csv", text)).rates == tuple(2.0 * hour for hour in range(1, 25))


def test_hours_are_those_of_the_first_times_zone(tmp_path: Path) -> None:
    """A clock that changes on the way counts on as it began; seconds since 1970 are UTC's."""
    zoned = HOURLY.replace(":00,", ":00+02:00,").replace("T23:00+02:00", "T22:00+01:00")
    assert read_load(written(tmp_path / "load.csv", zoned)).rates == tuple(range(1, 25))
    began = 1_793_577_600  # 2026-11-02
    seconds = "time,requests\n" + "".join(f"{began + 3600 * hour},{3600 * (hour + 1)}\n" for hour in range(24))
    assert read_load(written(tmp_path / "load.csv", seconds)).rates == tuple(range(1, 25))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "time,requests\n",
        "when,requests\n1,2\n",
        "time,time\n1,2\n",
        HOURLY.replace(",3600\n", ",-3600\n"),
        HOURLY.replace(",7200\n", ",nan\n"),
        HOURLY.replace(",7200\n", ",inf\n"),
        HOURLY.replace(",7200\n", ",many\n"),
        HOURLY.replace(",7200\n", ",\n"),
        HOURLY.replace(",7200\n", "\n"),
        HOURLY.replace("2026-11-02T01:00", "nan"),
        HOURLY.replace("2026-11-02T01:00", "yesterday"),
        HOURLY.replace("T01:00", "T01:00Z"),
        HOURLY.replace("T01:00", "T01:07"),
        HOURLY.replace("T01:00", "T01:00:01"),
        "time,requests\n2026-11-02T00:00,1\n2026-11-02T00:30,1\n2026-11-03T01:15,1\n",
        "time,requests\n2026-11-02,86400\n2026-11-03,86400\n",
        "".join(HOURLY.splitlines(keepends=True)[:5]),
        "time,requests\n" + "".join(f"2026-11-02T{h:02}:00,0\n" for h in range(24)),
    ],
)
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str) -> None:
    with refuses(UserError) as error:
        read_load(written(tmp_path / "load.csv", text))
    assert "--load" in error.value.message and "\n" not in error.value.message


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "load.csv").write_bytes(b"time\n\xff\xfe\n")
    for path in (tmp_path / "none.csv", tmp_path, tmp_path / "load.csv"):
        with refuses(UserError):
            read_load(path)
