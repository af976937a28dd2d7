"""Spot capacity over time, from ledgers, files and profiles."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.operations.plan.capacity import (
    ASSUMED_WAIT,
    ENOUGH,
    PastAttempt,
    PodCapacity,
    from_attempts,
    from_file,
    from_profile,
)
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import poisson_quantile
from tests.support.wording import refuses

HOUR = 3600.0


def test_all_causes_count_but_the_trainings_own_mistakes() -> None:
    taken = [
        PastAttempt(1.0 * HOUR, 2 * HOUR, "killed, or its machine was lost"),
        PastAttempt(4.0 * HOUR, 1 * HOUR, "rank 0: SIGTERM: evicted"),
        PastAttempt(5.5 * HOUR, 1 * HOUR, "UserError: no such column"),
        PastAttempt(7.0 * HOUR, 3 * HOUR, "finished"),
    ]
    capacity = from_attempts([taken])
    assert capacity and capacity.interruptions == 2 and capacity.hours == 7
    assert capacity.ups == (2, 1) and capacity.waits == (1, 0.5)
    assert capacity.between == pytest.approx(7 / 2.5)


def test_an_attempt_that_may_be_at_work_is_no_interruption() -> None:
    capacity = from_attempts([[PastAttempt(HOUR, HOUR, "killed, or its machine was lost", pods=3)]])
    assert capacity and capacity.interruptions == 0 and capacity.hours == 3
    assert from_attempts([]) is None and from_attempts([[]]) is None


def test_without_noted_begins_there_are_no_waits() -> None:
    capacity = from_attempts([[PastAttempt(0.0, HOUR, "preempted"), PastAttempt(0.0, HOUR, "finished")]])
    assert capacity and capacity.interruptions == 1 and not capacity.waits and capacity.wait == ASSUMED_WAIT
    assert "assumed" in str(capacity)


def test_the_interval_holds_the_true_rate_as_often_as_it_says() -> None:
    """Of 400 records of 50 hours at one interruption in 10 hours: 95 % to within what chance allows."""
    random = np.random.default_rng(5)
    held = 0
    for count in random.poisson(5, 400):
        low, high = PodCapacity("", int(count), 50.0).interval() or (0, 0)
        held += low <= 10 <= high
    missed = 400 - held
    assert poisson_quantile(20, 0.001) <= missed <= poisson_quantile(20, 0.999)


def test_more_pods_are_interrupted_more_often() -> None:
    random = np.random.default_rng(0)
    chosen = np.arange(20_000)
    for capacity in (PodCapacity("", rate=0.1), PodCapacity("", 100, 1000.0, ups=(10.0,) * 100)):
        one, four = (capacity.weather(pods, len(chosen), random).up(chosen).mean() for pods in (1, 4))
        assert one == pytest.approx(10, rel=0.03) and four == pytest.approx(2.5, rel=0.03)


def test_hours_of_attempts_that_were_not_interrupted_lengthen_the_times() -> None:
    random, chosen = np.random.default_rng(0), np.arange(10_000)
    ups = (1.0,) * ENOUGH
    recorded = PodCapacity("", ENOUGH, 3.0 * ENOUGH, ups=ups)
    assert recorded.weather(1, len(chosen), random).up(chosen).mean() == pytest.approx(3.0)


@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_file_has_times_and_waits(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"zone.{form}"
    csv = "up_hours,wait_hours\n4.5,0.5\n1.5,\n"
    path.write_text(csv if form == "csv" else json.dumps({"up_hours": [4.5, 1.5], "wait_hours": [0.5]}))
    capacity = from_file(path)
    assert capacity.ups == (4.5, 1.5) and capacity.waits == (0.5,) and capacity.hours == 6
    assert "2 in 6 pod-hours of zone" in str(capacity)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "up,wait\n1,2\n"),
        ("a.csv", "up_hours,wait_hours\n-1,2\n"),
        ("a.csv", "up_hours,wait_hours\n"),
        ("a.csv", "up_hours,wait_hours\n0,2\n"),
        ("a.json", "[1]"),
        ("a.json", '{"up_hours": ["x"], "wait_hours": []}'),
        ("a.json", f'{{"up_hours": [{10**400}], "wait_hours": []}}'),
        ("a.json", "[" * 100_000),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with refuses(UserError):
        from_file(tmp_path / name)


def test_a_profile_says_a_rate_and_not_how_sure_it_is() -> None:
    capacity = from_profile("a100-spot", 2.0)
    assert capacity and capacity.between == 12 and capacity.interval() is None
    assert from_profile("local", 0.0) is None


def test_a_field_beyond_the_limit_of_csv_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("up_hours,wait_hours\n" + "1" * 200_000)
    before = csv.field_size_limit(131_072)  # reading tables raises it for the whole process
    try:
        with refuses(UserError):
            from_file(tmp_path / "a.csv")
    finally:
        csv.field_size_limit(before)
