"""Retry policy for requests to any store: number of tries and pauses."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from slipstream.shared.storage.limits import current_limit

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

T = TypeVar("T")


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
