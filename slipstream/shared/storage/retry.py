"""Retry policy for requests to any store: number of tries and pauses."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from slipstream.shared.storage.base import StorageUnavailable

# Data requests may be retried for minutes (:mod:`slipstream.shared.storage.retry`). Within :func:`call_within` all
# tries of all requests end by one deadline. Every try has a new connection, as a connection to a lost machine hangs for
# minutes.
T = TypeVar("T")
#: Largest share of the limit for a single try, so that another try can follow.
SHARE = 0.5
#: Shortest timeout in seconds of a try, including the last.
SHORTEST_TRY_S = 0.01


@dataclass(frozen=True)
class RequestTimeLimit:
    """Time limit shared by all requests of one call of :func:`call_within`."""

    seconds: float
    #: Deadline by ``time.monotonic``.
    ends: float

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    @property
    def try_s(self) -> float:
        """Timeout in seconds of a try that starts now."""
        return max(SHORTEST_TRY_S, min(self.remaining_s, SHARE * self.seconds))


_limit: ContextVar[RequestTimeLimit | None] = ContextVar("limit", default=None)


def current_limit() -> RequestTimeLimit | None:
    """Return this thread's limit, set by :func:`call_within`; None for data requests."""
    return _limit.get()


def call_within(seconds: float, work: Callable[[], T]) -> T:
    """Run ``work`` and return its result; its requests to a store share ``seconds``, or the caller's shorter limit.

    Raises ``StorageUnavailable`` at the deadline. ``work`` runs in its own thread, since no socket timeout ends a
    hanging name lookup or a trickling answer. At the deadline the abandoned thread starts no further try.
    """
    limit, outer = RequestTimeLimit(seconds, time.monotonic() + seconds), current_limit()
    if outer is not None and outer.ends < limit.ends:
        limit = outer
    outcome: Future[T] = Future()

    def run() -> None:
        _limit.set(limit)
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        if limit.remaining_s:
            threading.Thread(target=run, name="within", daemon=True).start()
    except RuntimeError as error:  # The pod may have no more threads.
        raise StorageUnavailable(f"no request could be made ({error})") from None
    try:
        return outcome.result(limit.remaining_s)
    except TimeoutError:
        if outcome.done():  # The work itself raised it.
            raise
        raise StorageUnavailable(f"the store did not answer within {limit.seconds:g} s") from None


#: Number of tries per request; the pauses between them sum to 33 to 45 seconds.
ATTEMPTS = 12
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 8.0
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
#: HTTP statuses after which another try may succeed.
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
#: Generator for jitter. The clients' own retries use Python's global generator, so a retry would change a model's
#: numbers.
JITTER = random.Random()


#: Time, by ``time.monotonic``, of the last failed try that was to be repeated.
_last_failure = -math.inf


def failed_since(moment: float) -> bool:
    """Return True if a request has failed since ``moment``, by ``time.monotonic``."""
    return _last_failure >= moment


def retry_pause(attempt: int) -> float:
    """Return the pause in seconds after failed try ``attempt`` (from 1): exponential with up to 25 % jitter."""
    global _last_failure
    _last_failure = time.monotonic()
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
    return longest * JITTER.uniform(0.75, 1.0)


def pause_before_next(attempt: int) -> float | None:
    """Return the pause in seconds after failed try ``attempt`` (from 1), or None if it was the last."""
    limit = current_limit()
    if limit is None and attempt >= ATTEMPTS:
        return None
    seconds = retry_pause(attempt)
    return seconds if limit is None or seconds < limit.remaining_s else None


def retries_in_words() -> str:
    """Return how often, or for how long, this thread's requests are tried, as words for an error message."""
    limit = current_limit()
    return f"in {ATTEMPTS} attempts" if limit is None else f"within {limit.seconds:g} s"


def retry_transient(request: Callable[[], T], transient: Callable[[Exception], bool]) -> T:
    """Return the result of ``request``, repeated after ``transient`` errors.

    Raises the last error, or the first that is not ``transient``.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return request()
        except Exception as error:
            if not transient(error) or (seconds := pause_before_next(attempt)) is None:
                raise
        time.sleep(seconds)
