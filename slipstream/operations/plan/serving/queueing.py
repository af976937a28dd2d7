"""Waiting of requests for replicas that share one queue, while the rate is steady.

The probability of waiting is Erlang's C. The mean wait interpolates between exponential and constant service times
(Cosmetatos, "Some approximate equilibrium results for the multi-server queue M/G/r", 1976). The tail is exponential
with the rate of Cramér and Lundberg's equation (Asmussen, "Applied Probability and Queues", 2003). Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

#: Fraction of requests above the p99.
BEYOND = 0.01
#: Utilisations of the tables, and points and largest growth of the equation's solutions.
BUSY = np.linspace(0.0, 1.0, 513)
POINTS, LARGEST_GROWTH = 600, 30.0
#: Servers above which requests are assumed to wait only if the servers are overloaded.
MOST_SERVERS = 4096


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


@cache
def waiting_chances(servers: int) -> np.ndarray:
    """Return the probability that a request of M/M/c waits at every utilisation of :data:`BUSY` (Erlang's C)."""
    if servers > MOST_SERVERS:
        return np.where(BUSY < 1, 0.0, 1.0)
    load, lost = BUSY * servers, np.ones_like(BUSY)
    for busy in range(1, servers + 1):
        lost = load * lost / (busy + load * lost)
    return np.minimum(lost / (1 - BUSY * (1 - lost)), 1.0)


@cache
def decay_rates(service: ServiceTimes) -> np.ndarray:
    """Return the decay rate of the wait, times mean service time per server, at every utilisation of :data:`BUSY`.

    It is the solution d of E[exp(d S)] = 1 + d / busy, where S is the service time divided by its mean.
    """
    shares, times = np.array(service.shares), np.array(service.times)
    relative = times / np.dot(times, shares)
    rates = np.geomspace(1e-4, LARGEST_GROWTH / relative[-1], POINTS)
    busy = rates / (np.exp(np.outer(rates, relative)) @ shares - 1)
    listed = np.dot(np.square(relative), shares)
    return np.interp(BUSY, busy[::-1], rates[::-1]) * listed / (1 + service.cv2)


@dataclass(frozen=True)
class WaitingTimes:
    """Distributions of the wait at several utilisations: P(wait > x) = min(chance, amplitude · exp(-rate · x))."""

    chance: np.ndarray
    amplitude: np.ndarray
    rate: np.ndarray

    @classmethod
    def of(cls, service: ServiceTimes, servers: int, busy: np.ndarray, seconds: float) -> WaitingTimes:
        """Return those of ``servers`` that are ``busy`` for ``seconds``, in which a queue cannot become longer."""
        chance = np.interp(busy, BUSY, waiting_chances(servers))
        # Beyond 1, a queue loses capacity while it is empty: as much as waits in a queue that is as far below 1.
        decay = np.interp(np.minimum(busy, 2 - busy), BUSY, decay_rates(service))
        idle = np.maximum(1 - busy, 1e-9)
        many = (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * servers)
        constant = (1 + np.minimum(1.0, many * idle / np.maximum(busy, 1e-9))) / 2
        mean = service.cv2 + (1 - service.cv2) * constant
        requests = np.maximum(busy * seconds * servers / service.mean, 1.0)
        # The count is known: arrivals deviate from it as a bridge does, service times as a random walk.
        least = 1 / np.sqrt(requests * (1 / 6 + service.cv2 / 2))
        amplitude = np.where(busy < 1, chance * np.minimum(decay * mean / idle, 2.0), 1.0)
        return cls(chance, amplitude, np.hypot(decay, least) * servers / service.mean)

    def exceeding(self, than: np.ndarray) -> np.ndarray:
        """Return P(wait > than); 1 below 0."""
        tail = self.amplitude * np.exp(-self.rate * np.maximum(than, 0.0))
        return np.where(than < 0, 1.0, np.minimum(self.chance, tail))

    def integral(self, to: np.ndarray) -> np.ndarray:
        """Return the integral of :meth:`exceeding` from 0 to ``to``."""
        flat = np.log(np.maximum(self.amplitude / np.maximum(self.chance, 1e-300), 1.0)) / self.rate
        right = np.maximum(to, 0.0)
        tails = np.exp(-self.rate * flat) - np.exp(-self.rate * np.maximum(right, flat))
        return np.where(to < 0, to, self.chance * np.minimum(right, flat) + self.amplitude / self.rate * tails)
