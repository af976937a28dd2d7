"""Waiting in a queue: the formula against simulated queues."""

import numpy as np
import pytest

from slipstream.operations.plan.serving.queueing import MOST_BUSY, ServiceTimes, erlang_c, p99_seconds, servers_needed
from tests.support.proving import diagonal, first_few
from tests.support.wording import refuses

SHARES = (np.arange(2000) + 0.5) / 2000
STEADY = ServiceTimes.of([0.01])
EXPONENTIAL = ServiceTimes.of((-0.01 * np.log(1 - SHARES)).tolist())
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
    exponential = service is EXPONENTIAL
    return random.exponential(0.01, (REQUESTS, QUEUES)) if exponential else np.full((REQUESTS, QUEUES), 0.01)


@pytest.mark.parametrize(("busy", "servers"), diagonal((0.3, 0.6, 0.8, 0.9), (1, 2, 5, 16)))
@pytest.mark.parametrize("service", first_few([STEADY, EXPONENTIAL], names=["steady", "exponential"]))
def test_the_p99_is_that_of_a_simulated_queue_to_20_percent(service: ServiceTimes, servers: int, busy: float) -> None:
    rate, random = busy * servers / service.mean, np.random.default_rng(servers)
    found = simulated_p99(servers, random.exponential(1 / rate, (REQUESTS, QUEUES)), times_of(service, random))
    assert p99_seconds(rate, service, servers, 1.0) == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_without_the_variation_of_service_times_it_would_be_far_off(servers: int) -> None:
    """M/M/c is for exponential times, which steady ones are not."""
    rate, random = 0.8 * servers / STEADY.mean, np.random.default_rng(0)
    found = simulated_p99(servers, random.exponential(1 / rate, (REQUESTS, QUEUES)), times_of(STEADY, random))
    assert p99_seconds(rate, EXPONENTIAL, servers, 1.0) > 1.3 * found


@pytest.mark.parametrize("servers", first_few([1, 4], 1))
def test_uneven_arrivals_make_it_longer_and_even_ones_shorter(servers: int) -> None:
    rate, random = 0.8 * servers / STEADY.mean, np.random.default_rng(0)
    # Of two kinds of gaps, so that their standard deviation is twice their mean; and of four stages.
    unequal = np.sqrt(3 / 5)
    kinds = np.where(random.random((REQUESTS, QUEUES)) < (1 - unequal) / 2, 1 - unequal, 1 + unequal)
    uneven = random.exponential(1 / rate, (REQUESTS, QUEUES)) / kinds
    even = random.gamma(4, 0.25 / rate, (REQUESTS, QUEUES))
    for gaps, cv2 in ((uneven, 4.0), (even, 0.25)):
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(cv2, rel=0.05)
        found = simulated_p99(servers, gaps, times_of(EXPONENTIAL, random))
        assert p99_seconds(rate, EXPONENTIAL, servers, cv2) == pytest.approx(found, rel=0.2)
    assert (
        p99_seconds(rate, STEADY, servers, 0.25)
        < p99_seconds(rate, STEADY, servers, 1.0)
        < p99_seconds(rate, STEADY, servers, 4.0)
    )


@pytest.mark.parametrize(("servers", "load", "waits"), [(1, 0.3, 0.3), (2, 1, 1 / 3), (5, 4, 0.5541), (3, 3, 1)])
def test_erlang_c_is_that_of_the_tables(servers: int, load: float, waits: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(waits, abs=1e-4)


def test_the_p99_of_m_m_1_is_known() -> None:
    assert p99_seconds(50.0, EXPONENTIAL, 1, 1.0) == pytest.approx(np.log(100) / (100 - 50), rel=0.01)
    assert p99_seconds(101.0, EXPONENTIAL, 1, 1.0) == np.inf
    assert p99_seconds(1e-9, STEADY, 1, 1.0) == STEADY.p99 == 0.01


@pytest.mark.parametrize("limit", [0.011, 0.02, 0.2])
@pytest.mark.parametrize("rate", [0.0, 1.0, 95.0, 3_000.0])
def test_replicas_are_the_fewest_that_keep_the_p99(rate: float, limit: float) -> None:
    servers = servers_needed(rate, STEADY, limit, 1.0)
    assert p99_seconds(rate, STEADY, servers, 1.0) <= limit and rate * STEADY.mean <= MOST_BUSY * servers
    if servers > 1:
        fewer_do = p99_seconds(rate, STEADY, servers - 1, 1.0) <= limit and rate * STEADY.mean <= MOST_BUSY * (
            servers - 1
        )
        assert not fewer_do


def test_no_replica_is_planned_to_be_busy_for_more_than_nine_tenths() -> None:
    assert [servers_needed(rate, STEADY, 60.0, 1.0) for rate in (89.0, 91.0, 179.0, 181.0)] == [1, 2, 2, 3]


def test_a_limit_below_the_service_is_refused() -> None:
    with refuses(ValueError):
        servers_needed(1.0, STEADY, 0.009, 1.0)


@pytest.mark.parametrize(
    ("times", "shares"), [((), ()), ((0.1,), (0.5,)), ((0.1, 0.05), (0.5, 0.5)), ((0.0,), (1.0,)), ((np.inf,), (1.0,))]
)
def test_what_are_no_times_is_refused(times: tuple[float, ...], shares: tuple[float, ...]) -> None:
    with refuses(ValueError):
        ServiceTimes(times, shares, 0.1, 0.0)


def test_no_request_waits_where_the_chance_is_as_good_as_none() -> None:
    """Against the recursion that takes a step for each server, which is cut off."""
    for busy in (0.01, 0.5, 0.9, 0.99):
        for servers in (1, 2, 10, 100, 1_000, 10_000):
            load, lost = busy * servers, 1.0
            for each in range(1, servers + 1):
                lost = load * lost / (each + load * lost)
            assert erlang_c(servers, load) == pytest.approx(lost / (1 - busy * (1 - lost)), rel=1e-9, abs=1e-17)
    assert erlang_c(10**15, 0.9 * 10**15) == 0 and erlang_c(3, 5e-324) == 0
