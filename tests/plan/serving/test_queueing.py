"""Waiting in a queue: the plan against simulated queues."""

import time

import numpy as np
import pytest

from harness.simulated_queue import RecordedDay, recorded_days
from slipstream.operations.plan.serving.load import HOURS, Arrivals, RequestLoad, load_of
from slipstream.operations.plan.serving.queueing import BUSY, ServiceTimes, waiting_chances
from slipstream.operations.plan.serving.recorded_queue import MOST_BUSY, RecordedQueue, replicas_by_hour
from tests.support.proving import diagonal, first_few
from tests.support.recorded_loads import steady_p99
from tests.support.wording import refuses

SHARES = (np.arange(2000) + 0.5) / 2000
STEADY = ServiceTimes.of([0.01])
EXPONENTIAL = ServiceTimes.of((-0.01 * np.log(1 - SHARES)).tolist())
#: As a measured model: half of the requests take as long, a hundredth twice as long.
UNEVEN = ServiceTimes.weighted((0.01, 0.011, 0.012, 0.02), (0.5, 0.4, 0.09, 0.01))
#: Queues that are simulated in parallel, requests per queue, and warm-up requests, which find the queue empty and do
#: not count.
QUEUES, REQUESTS, WARM = 1_000, 4_000, 1_500


def simulated_p99(servers: int, gaps: np.ndarray, times: np.ndarray) -> float:
    """Of requests ``[REQUESTS, QUEUES]`` that wait in one line for the server that is free first."""
    busy, queues, taken = np.zeros((QUEUES, servers)), np.arange(QUEUES), []
    for gap, takes in zip(gaps, times, strict=True):
        busy = np.maximum(busy - gap[:, None], 0.0)
        first = busy.argmin(axis=1)
        busy[queues, first] += takes
        taken.append(busy[queues, first])
    return float(np.quantile(taken[WARM:], 0.99))


def times_of(service: ServiceTimes, random: np.random.Generator) -> np.ndarray:
    return random.choice(service.times, p=service.shares, size=(REQUESTS, QUEUES))


@pytest.mark.parametrize(("busy", "servers"), diagonal((0.3, 0.6, 0.8, 0.9), (1, 2, 5, 16)))
@pytest.mark.parametrize("service", first_few([UNEVEN, STEADY, EXPONENTIAL], names=["uneven", "steady", "exponential"]))
def test_the_p99_is_that_of_a_simulated_queue_to_10_percent(service: ServiceTimes, servers: int, busy: float) -> None:
    rate, random = busy * servers / service.mean, np.random.default_rng(servers)
    found = simulated_p99(servers, random.exponential(1 / rate, (REQUESTS, QUEUES)), times_of(service, random))
    assert steady_p99(rate, service, servers) == pytest.approx(found, rel=0.1)


def recorded(counts: np.ndarray) -> RequestLoad:
    return load_of("day", dict(enumerate(counts.astype(float).tolist())), 1)


def hour_alone(arrivals: Arrivals, hour: int) -> Arrivals:
    chosen = arrivals.hours == hour
    return Arrivals(arrivals.at[chosen], arrivals.requests[chosen], arrivals.length)


@pytest.mark.parametrize("limit", first_few([100, 20]))
@pytest.mark.parametrize("name", first_few(["smooth", "bursty", "flat", "idle night"]))
def test_replicas_of_recorded_seconds_are_those_of_a_simulation(name: str, limit: int) -> None:
    """Of every request of an hour, which comes at any moment of its second; the limit is in mean times."""
    counts = recorded_days(300.0)[name]
    load, hour, service = recorded(counts), 12, UNEVEN.times_as_long(0.4)
    planned = replicas_by_hour(load.arrivals, load.rates, service, limit * service.mean)
    assert planned
    day = RecordedDay(counts, service.times, service.shares, draws=2)
    servers, p99 = day.fewest(hour, limit * service.mean)
    assert planned[0][hour] == servers
    mine = RecordedQueue(hour_alone(load.arrivals, hour), service).p99(np.full(len(HOURS), servers))
    assert mine == pytest.approx(p99, rel=0.1)
    if name == "idle night":
        assert set(planned[0][:8]) == {1}


def test_a_burst_needs_what_its_own_second_needs() -> None:
    """One second in which 300 requests come, where 100 a second are served; by hand: 2 s, or 100 ms with 3 replicas."""
    counts = np.full(86_400, 1)
    counts[12 * 3600 + 30] = 300
    load = recorded(counts)
    queue = RecordedQueue(load.arrivals, STEADY)
    assert queue.p99(np.full(24, 1)) == pytest.approx(2.0, rel=0.05)
    planned = replicas_by_hour(load.arrivals, load.rates, STEADY, 0.3)
    assert planned and planned[0][12] == 3 and set(planned[0][:12] + planned[0][13:]) == {1}


def test_a_backlog_is_carried_into_the_next_hour() -> None:
    counts = np.zeros(86_400)
    counts[3600 - 30 : 3600], counts[3600:7200] = 200, 1
    queue = RecordedQueue(recorded(counts).arrivals, STEADY)
    backlog = queue.backlog(np.full(24, 1))
    assert backlog.end[29] == pytest.approx(30.0) and backlog.begin[30] == pytest.approx(30.0)
    assert list(queue.hours_kept(np.full(24, 1), 1.0)[:3]) == [False, False, True]
    assert list(queue.hours_kept(np.full(24, 1), 1.0, apart=True)[:3]) == [False, True, True]


def test_a_day_by_seconds_takes_a_moment() -> None:
    load = recorded(recorded_days(9_000.0)["bursty"])
    began = time.process_time()
    assert replicas_by_hour(load.arrivals, load.rates, UNEVEN.times_as_long(0.004), 0.005)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(("servers", "load", "waits"), [(1, 0.3, 0.3), (2, 1, 1 / 3), (5, 4, 0.5541), (3, 3, 1)])
def test_erlang_c_is_that_of_the_tables(servers: int, load: float, waits: float) -> None:
    assert np.interp(load / servers, BUSY, waiting_chances(servers)) == pytest.approx(waits, abs=1e-4)


def test_the_p99_of_m_m_1_is_known() -> None:
    assert steady_p99(50.0, EXPONENTIAL, 1) == pytest.approx(np.log(100) / (100 - 50), rel=0.02)
    assert steady_p99(1e-6, STEADY, 1) == pytest.approx(STEADY.p99)


@pytest.mark.parametrize("limit", [0.011, 0.02, 0.2])
@pytest.mark.parametrize("rate", [1.0, 95.0, 3_000.0])
def test_replicas_are_the_fewest_that_keep_the_p99(rate: float, limit: float) -> None:
    load = load_of("day", {hour * 3600: 3600 * rate for hour in HOURS}, 3600)
    planned = replicas_by_hour(load.arrivals, load.rates, STEADY, limit)
    assert planned
    (servers,) = set(planned[0])
    assert steady_p99(rate, STEADY, servers) <= limit * (1 + 1e-9) and rate * STEADY.mean <= MOST_BUSY * servers
    if servers > 1:
        fewer_are_kept = rate * STEADY.mean <= MOST_BUSY * (servers - 1)
        assert not fewer_are_kept or steady_p99(rate, STEADY, servers - 1) > limit


def test_no_replica_is_planned_to_be_busy_for_more_than_nine_tenths() -> None:
    def servers(rate: float) -> set[int]:
        load = load_of("day", {hour * 3600: 3600 * rate for hour in HOURS}, 3600)
        planned = replicas_by_hour(load.arrivals, load.rates, STEADY, 60.0)
        assert planned
        return set(planned[0])

    assert [servers(rate) for rate in (89.0, 91.0, 179.0, 181.0)] == [{1}, {2}, {2}, {3}]


def test_a_limit_below_the_service_is_kept_by_no_number() -> None:
    load = recorded(np.ones(86_400))
    assert replicas_by_hour(load.arrivals, load.rates, STEADY, 0.009) is None


@pytest.mark.parametrize(
    ("times", "shares"), [((), ()), ((0.1,), (0.5,)), ((0.1, 0.05), (0.5, 0.5)), ((0.0,), (1.0,)), ((np.inf,), (1.0,))]
)
def test_what_are_no_times_is_refused(times: tuple[float, ...], shares: tuple[float, ...]) -> None:
    with refuses(ValueError):
        ServiceTimes(times, shares, 0.1, 0.0)


def test_thousands_of_servers_are_not_counted_one_by_one() -> None:
    for waits in (waiting_chances(10**15), waiting_chances(4096)):
        assert waits[-1] == 1 and waits[: int(0.9 * len(waits))].max() < 1e-6
