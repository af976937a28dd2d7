"""Latency of replicas that share one queue, and the number of replicas for a p99.

The probability of waiting is Erlang's C. The waiting time is assumed exponential, with the mean of M/M/c times (ca² +
cs²)/2, where ca and cs are the coefficients of variation of interarrival and service times (Allen and Cunneen; Allen,
"Probability, Statistics, and Queueing Theory", 1990). Times are seconds; a load is arrivals per second times mean
service seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

#: Fraction of requests above the p99.
BEYOND = 0.01
#: Maximum planned utilisation of replicas. The formula was compared with simulated queues up to here, and beyond it a
#: 10 % higher load makes the queue grow without end.
MOST_BUSY = 0.9
HALVINGS = 60
#: Log probability that is negligible against :data:`BEYOND` in floating point.
NEVER = -40.0


@dataclass(frozen=True)
class ServiceTimes:
    """Distribution of service times, without waiting.

    ``times`` ascend, with their ``shares`` of the requests. Mean and squared coefficient of variation may come from
    more times.
    """

    times: tuple[float, ...]
    shares: tuple[float, ...]
    mean: float
    cv2: float

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if this is not a distribution of times."""
        whole = math.isclose(sum(self.shares), 1.0) and min(self.shares, default=0.0) >= 0
        ascending = list(self.times) == sorted(self.times) and all(0 < time < math.inf for time in self.times)
        if len(self.times) != len(self.shares) or not whole or not ascending or self.mean <= 0 or self.cv2 < 0:
            raise ValueError("expected ascending times above 0, and a share for each, which make 1 together")

    @classmethod
    def of(cls, times: Sequence[float]) -> ServiceTimes:
        """Return the distribution of equally frequent times."""
        return cls.weighted(sorted(times), [1 / len(times)] * len(times))

    @classmethod
    def weighted(cls, times: Sequence[float], shares: Sequence[float]) -> ServiceTimes:
        """Return the distribution of these times and fractions."""
        mean = float(np.dot(times, shares))
        cv2 = max(0.0, float(np.dot(np.square(times), shares)) / mean**2 - 1)
        return cls(tuple(times), tuple(shares), mean, cv2)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        """Smallest time that at most :data:`BEYOND` of the requests exceed."""
        return self.quantile(1 - BEYOND)

    def quantile(self, share: float) -> float:
        return self.times[int(np.argmax(np.cumsum(self.shares) >= share - 1e-12))]

    def times_as_long(self, factor: float) -> ServiceTimes:
        return ServiceTimes(tuple(factor * time for time in self.times), self.shares, factor * self.mean, self.cv2)


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request of M/M/c waits; 1 if the load is at least ``servers``.

    It is at most about the probability of ``servers`` or more Poisson arrivals with mean ``load`` (Chernoff's bound),
    divided by the idle fraction. If that is negligible the result is 0, which limits the loop to thousands of steps up
    to the utilisation :data:`MOST_BUSY`.
    """
    if load >= servers:
        return 1.0
    if not load:
        return 0.0
    idle = 1 - load / servers
    if servers * (idle + math.log(load) - math.log(servers)) - math.log(idle) < NEVER:
        return 0.0
    lost = 1.0
    for busy in range(1, servers + 1):
        lost = load * lost / (busy + load * lost)
    return lost / (1 - load / servers * (1 - lost))


def p99_seconds(rate: float, service: ServiceTimes, servers: int, arrivals_cv2: float) -> float:
    """Return the p99 of waiting plus service at ``rate`` arrivals per second; infinite if overloaded."""
    load = rate * service.mean
    if load >= servers:
        return math.inf
    waits = erlang_c(servers, load)
    mean_wait = service.mean / (servers - load) * (arrivals_cv2 + service.cv2) / 2
    if not mean_wait or waits <= 0:
        return service.p99
    times, shares = np.array(service.times), np.array(service.shares)

    def longer(than: float) -> float:
        left = np.maximum(than - times, 0.0)
        return float(np.dot(np.where(times > than, 1.0, waits * np.exp(-left / mean_wait)), shares))

    low, high = 0.0, service.times[-1] - mean_wait * math.log(BEYOND)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if longer(middle) > BEYOND else (low, middle)
    return high


def servers_needed(rate: float, service: ServiceTimes, limit: float, arrivals_cv2: float) -> int:
    """Return the fewest servers, at least 1, with a p99 within ``limit`` and utilisation within :data:`MOST_BUSY`.

    Raises ``ValueError`` if service without waiting exceeds ``limit``.
    """
    if service.p99 > limit:
        raise ValueError(f"a p99 of {limit:g} s is less than service alone takes, {service.p99:g} s")
    fewest = max(1, math.ceil(rate * service.mean / MOST_BUSY))
    return next(
        servers for servers in count(fewest) if p99_seconds(rate, service, servers, arrivals_cv2) <= limit * (1 + 1e-9)
    )
