"""Recorded requests that wait for replicas in one queue, at the resolution of the recording.

The backlog is a recursion over the intervals: what an interval adds and its replicas cannot serve waits for the next.
Within an interval the requests arrive at random, evenly, and wait for the backlog and as in a queue at a steady rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.operations.plan.serving.load import HOURS, Arrivals
from slipstream.operations.plan.serving.queueing import BEYOND, ServiceTimes, WaitingTimes

#: Maximum planned utilisation of the replicas in the busiest minute: beyond it a 10 % higher load makes the queue grow
#: without end.
MOST_BUSY = 0.9
HALVINGS = 30
#: Points of utilisation between which intervals without backlog are interpolated.
GRID = 257
#: Intervals that are computed at a time, since every service time is an array of them.
TOGETHER = 100_000
#: Relative tolerance of a limit.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Backlog:
    """Seconds that a request waits for the backlog at the ``begin`` and the ``end`` of every interval's arrivals.

    ``share`` is the fraction of the interval in which there is a backlog, and ``busy`` the utilisation.
    """

    begin: np.ndarray
    end: np.ndarray
    share: np.ndarray
    busy: np.ndarray


class RecordedQueue:
    """Queue that is fed with a recording."""

    def __init__(self, arrivals: Arrivals, service: ServiceTimes) -> None:
        self.arrivals, self.service = arrivals, service
        self._hours, self._minute = arrivals.hours, arrivals.minute
        self._gaps = arrivals.gaps
        self._requests = np.bincount(self._minute, arrivals.requests)
        starts = np.flatnonzero(np.diff(self._minute, prepend=-1))
        self._hour_of_minute = self._hours[starts]

    def backlog(self, replicas: np.ndarray, *, apart: bool = False, starts: np.ndarray | float = 0.0) -> Backlog:
        """Return the backlog for ``replicas`` by hour of the day.

        ``apart`` forgets it at the end of every hour; ``starts`` are seconds for which nothing is served from the
        begin of an interval on.
        """
        servers, length = replicas[self._hours].astype(float), self.arrivals.length
        work = self.arrivals.requests * self.service.mean
        change = starts * servers + work - servers * self._gaps
        if apart:
            last = np.diff(self._hours, append=-1) != 0
            change[last] -= work.sum()
        total = np.concatenate([[0.0], np.cumsum(change)])
        before = (total - np.minimum.accumulate(total))[:-1]
        begin, busy = before / servers + starts, work / servers / length
        end = np.maximum(begin + (busy - 1) * length, 0.0)
        falls = np.divide(begin, (1 - busy) * length, out=np.ones_like(begin), where=busy < 1)
        return Backlog(begin, end, np.where(end > 0, 1.0, np.minimum(falls, 1.0)), busy)

    def late(self, replicas: np.ndarray, backlog: Backlog, than: float, only: np.ndarray | None = None) -> np.ndarray:
        """Return the requests of every interval that take longer ``than`` these seconds, or of those in ``only``."""
        chosen = np.arange(len(self._hours)) if only is None else only
        found = np.zeros(len(chosen))
        servers = replicas[self._hours[chosen]]
        for number in np.unique(servers):
            its = np.flatnonzero(servers == number)
            for part in np.array_split(its, 1 + len(its) // TOGETHER):
                here = chosen[part]
                share = self._waiting(int(number), backlog, here, than)
                found[part] = share * self.arrivals.requests[here]
        return found

    def _waiting(self, servers: int, backlog: Backlog, here: np.ndarray, than: float) -> np.ndarray:
        """Return the share of the requests of intervals that take longer ``than`` these seconds."""
        busy, share = backlog.busy[here], backlog.share[here]
        left = than - np.array(self.service.times)
        grid = np.linspace(0.0, busy.max(initial=0.0), GRID)
        steady = WaitingTimes.of(self.service, servers, grid[:, None], self.arrivals.length)
        without = np.interp(busy, grid, steady.exceeding(left) @ self.service.shares)
        kept = np.flatnonzero(share > 0)
        if not len(kept):
            return without
        queue = WaitingTimes.of(self.service, servers, busy[kept, None], self.arrivals.length)
        low = np.minimum(backlog.begin[here], backlog.end[here])[kept, None]
        high = np.maximum(backlog.begin[here], backlog.end[here])[kept, None]
        wide = np.maximum(high - low, ROUNDING * (high + than))
        waits = (queue.integral(left - low) - queue.integral(left - low - wide)) / wide
        without[kept] += share[kept] * (np.clip(waits, 0.0, 1.0) @ self.service.shares - without[kept])
        return without

    def hours_kept(self, replicas: np.ndarray, limit: float, *, apart: bool = False) -> np.ndarray:
        """Return for every hour of the day whether 99 % of each minute's requests take at most ``limit`` seconds."""
        return self._on_time(self.late(replicas, self.backlog(replicas, apart=apart), limit * (1 + ROUNDING)))

    def hours_possible(self, replicas: np.ndarray, limit: float) -> np.ndarray:
        """Return :meth:`hours_kept` as if a request waited for the backlog of its own hour alone."""
        backlog, left = self.backlog(replicas, apart=True), limit * (1 + ROUNDING) - self.service.times[0]
        low, high = np.minimum(backlog.begin, backlog.end), np.maximum(backlog.begin, backlog.end)
        above = np.where(high > left, (high - np.maximum(low, left)) / np.maximum(high - low, left * ROUNDING), 0.0)
        return self._on_time(above * backlog.share * self.arrivals.requests)

    def _on_time(self, late: np.ndarray) -> np.ndarray:
        minutes = np.bincount(self._minute, late) > BEYOND * self._requests
        return np.bincount(self._hour_of_minute[minutes], minlength=len(HOURS)) == 0

    def late_after_starts(self, replicas: np.ndarray, starts: np.ndarray, limit: float) -> tuple[float, float]:
        """Return the share of requests that take longer than ``limit``, and the longest seconds of a start's backlog.

        ``starts`` are seconds for which nothing is served from the begin of an interval on.
        """
        backlog = self.backlog(replicas, starts=starts)
        late = self.late(replicas, backlog, limit * (1 + ROUNDING)).sum() / self._requests.sum()
        at, length = self.arrivals.at, self.arrivals.length
        gone = np.append(at + backlog.share * length, at[-1] + length)
        free = np.append(np.flatnonzero(backlog.end == 0), len(at))
        first = np.flatnonzero(starts)
        until = gone[free[np.searchsorted(free, first)]] - at[first]
        return float(late), float(until.max(initial=0.0))

    def p99(self, replicas: np.ndarray) -> float:
        """Return the p99 of the minute with the longest, in seconds."""
        backlog = self.backlog(replicas)
        low, high = self.service.times[0] * (1 - ROUNDING), self.service.times[-1]
        only, minute = np.arange(len(self._minute)), self._minute

        def later(than: float) -> np.ndarray:
            late = self.late(replicas, backlog, than, only)
            return np.flatnonzero(np.bincount(minute, late, minlength=len(self._requests)) > BEYOND * self._requests)

        while len(found := later(high)):
            low, high = high, 2 * high
            only, minute = self._of(found)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if len(found := later(middle)):
                low = middle
                only, minute = self._of(found)
            else:
                high = middle
        return high

    def _of(self, minutes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the intervals of minutes, and the minute of each."""
        only = np.flatnonzero(np.isin(self._minute, minutes))
        return only, self._minute[only]


def replicas_by_hour(
    arrivals: Arrivals, rates: Sequence[float], service: ServiceTimes, limit: float
) -> tuple[tuple[int, ...], float] | None:
    """Return the fewest replicas by hour of the day, at least 1, and the longest p99; None if none keeps ``limit``.

    ``rates`` are requests a second in the busiest minute of every hour, for :data:`MOST_BUSY`.
    """
    if service.p99 > limit:
        return None
    queue = RecordedQueue(arrivals, service)
    fewest = np.array([max(1, math.ceil(rate * service.mean / MOST_BUSY)) for rate in rates])
    possible = least_kept(fewest, lambda tried: queue.hours_possible(tried, limit))
    found = least_kept(possible, lambda tried: queue.hours_kept(tried, limit, apart=True))
    while not (kept := queue.hours_kept(found, limit)).all():
        found = found + ~kept
    return tuple(found.tolist()), queue.p99(found)


def least_kept(fewest: np.ndarray, kept: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the least numbers from ``fewest`` on which are ``kept``, found by doubling and halving."""
    below, high, step = fewest - 1, fewest.copy(), 1
    while not (holds := kept(high)).all():
        below, high = np.where(holds, below, high), np.where(holds, high, high + step)
        step *= 2
    while (high - below > 1).any():
        middle = np.where(high - below > 1, (below + high) // 2, high)
        holds = kept(middle)
        below, high = np.where(holds, below, middle), np.where(holds, middle, high)
    return high
