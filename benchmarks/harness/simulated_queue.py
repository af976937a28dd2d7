"""Discrete-event simulation of requests that wait in one line for the replica that is free first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

MINUTE, HOUR, DAY = 60, 3600, 86_400
#: Seconds before a minute that are simulated with it, and the number of an hour's minutes that are.
LEAD, MOST = 20, 8
#: Maximum utilisation of the replicas in the busiest minute.
MOST_BUSY = 0.9


@dataclass(frozen=True)
class RecordedDay:
    """Requests in every second of a day, the times of a request, and the simulations of each minute."""

    counts: np.ndarray
    times: Sequence[float]
    shares: Sequence[float]
    draws: int = 4

    def minutes_of(self, hour: int) -> np.ndarray:
        """Return the minutes with the most requests, and with the most in ten seconds and in a second."""
        seconds = self.counts[hour * HOUR : (hour + 1) * HOUR].reshape(-1, MINUTE)
        tens = np.apply_along_axis(np.convolve, 1, seconds, np.ones(10), "valid").max(axis=1)
        chosen = [np.argsort(most)[-MOST:] for most in (seconds.sum(axis=1), tens, seconds.max(axis=1))]
        return hour * HOUR // MINUTE + np.unique(np.concatenate(chosen))

    def simulated_p99(self, hour: int, servers: int, seed: int = 0) -> float:
        """Return the p99 of the hour's minute with the longest."""
        random = np.random.default_rng(seed)
        minutes = np.repeat(self.minutes_of(hour), self.draws)
        begins = np.maximum(minutes * MINUTE - LEAD, 0)
        arrivals = [self._arrivals(begin, minute, random) for begin, minute in zip(begins, minutes, strict=True)]
        steps = max(map(len, arrivals))
        at = np.full((steps, len(minutes)), np.nan)
        for queue, its in enumerate(arrivals):
            at[: len(its), queue] = its
        takes = random.choice(self.times, p=self.shares, size=at.shape)
        free, queues, delays = np.zeros((len(minutes), servers)), np.arange(len(minutes)), np.empty(at.shape)
        for step in range(steps):
            first = free.argmin(axis=1)
            done = np.fmax(free[queues, first], at[step]) + takes[step]
            free[queues, first] = np.where(np.isnan(at[step]), np.inf, done)
            delays[step] = done - at[step]
        counted = at >= minutes * MINUTE
        each = [
            delays[:, q : q + self.draws][counted[:, q : q + self.draws]] for q in range(0, len(minutes), self.draws)
        ]
        return max((float(np.quantile(its, 0.99)) for its in each if len(its)), default=max(self.times))

    def _arrivals(self, begin: int, minute: int, random: np.random.Generator) -> np.ndarray:
        seconds = np.arange(begin, (minute + 1) * MINUTE)
        return np.sort(np.repeat(seconds, self.counts[seconds]) + random.random(self.counts[seconds].sum()))

    def fewest(self, hour: int, limit: float) -> tuple[int, float]:
        """Return the fewest servers of an hour that keep the p99 and are at most :data:`MOST_BUSY`, and its p99."""
        rate = max(self.counts[minute * MINUTE : (minute + 1) * MINUTE].mean() for minute in self.minutes_of(hour))
        least = max(1, int(np.ceil(rate * np.dot(self.times, self.shares) / MOST_BUSY)))
        return next((servers, p99) for servers in count(least) if (p99 := self.simulated_p99(hour, servers)) <= limit)


def recorded_days(rate: float) -> dict[str, np.ndarray]:
    """Return the requests of every second of four days, of ``rate`` a second on average by day."""
    random, seconds = np.random.default_rng(0), np.arange(DAY)
    night = np.where(seconds < 8 * HOUR, 0.0, rate)
    return {
        "flat": random.poisson(rate, DAY),
        "bursty": random.poisson(rate * random.gamma(0.5, 2, DAY)),
        "smooth": random.poisson(np.maximum(rate * (1 + 0.1 * random.standard_normal(DAY)), 0)),
        "idle night": random.poisson(night),
    }
