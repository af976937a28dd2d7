"""Recorded requests: hourly rates, burstiness, idle periods, and invalid records."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from slipstream.operations.plan.serving.load import MONTH_S, read_load
from slipstream.shared.errors import UserError
from tests.support.wording import refuses, same_wording

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
    assert load.cv2 == 1.0 and "assumed" in load.cv2_from


def test_the_busiest_minute_of_all_days_counts(tmp_path: Path) -> None:
    """Of a log: a request each 10 s for two days, and 60 within a minute of the second day."""
    each = [10.0 * index for index in range(2 * 8640)]
    burst = [86_400.0 + 9 * 3600 + 300 + index for index in range(60)]
    load = read_load(log(tmp_path / "load.csv", sorted(each + burst)))
    assert load.rates[9] == pytest.approx(66 / 60)
    assert {rate for hour, rate in enumerate(load.rates) if hour != 9} == {0.1}
    assert load.month == pytest.approx((2 * 8640 + 60) / 2 / 86_400 * MONTH_S)


@pytest.mark.prove
def test_poisson_even_and_batched_arrivals_are_told_apart(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    poisson = np.sort(random.uniform(0, 86_400, 40_000))
    batched = np.repeat(np.sort(random.uniform(0, 86_400, 8_000)), 5)
    even = np.arange(0, 86_400, 0.5)
    found = [read_load(log(tmp_path / "load.csv", each)) for each in (poisson, batched, even)]
    assert [load.cv2 for load in found] == pytest.approx([1.0, 5.0, 0.0], abs=0.15)
    same_wording(found[0].cv2_from)


def test_the_days_wave_is_no_unevenness(tmp_path: Path) -> None:
    """Poisson arrivals whose rate goes up and down tenfold within a day."""
    random = np.random.default_rng(0)
    rates = 0.55 + 0.45 * np.sin(np.arange(86_400) / 86_400 * 2 * np.pi)
    load = read_load(log(tmp_path / "load.csv", np.repeat(np.arange(86_400), random.poisson(rates))))
    assert load.cv2 == pytest.approx(1.0, abs=0.05) and max(load.rates) > 5 * min(load.rates)


def test_a_log_of_whole_minutes_says_nothing_of_seconds(tmp_path: Path) -> None:
    load = read_load(log(tmp_path / "load.csv", np.repeat(np.arange(0, 86_400, 60), 30)))
    assert load.cv2 == 1.0 and set(load.rates) == {0.5}


@pytest.mark.parametrize(("length", "told"), [(3, True), (10, False), (60, False)])
def test_counts_of_short_intervals_tell_how_uneven_requests_come(tmp_path: Path, length: int, told: bool) -> None:
    counts = np.tile([0, 12], 86_400 // length // 2)
    lines = (f"{(BEGIN + timedelta(seconds=length * index)).isoformat()},{each}" for index, each in enumerate(counts))
    load = read_load(written(tmp_path / "load.csv", "\n".join(["time,requests", *lines])))
    assert load.cv2 == (pytest.approx(6 * 20 / 19) if told else 1.0) and ("assumed" in load.cv2_from) != told


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
