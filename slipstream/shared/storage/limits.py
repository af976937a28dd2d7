"""Time limits of requests that must end soon, such as heartbeats.

Data requests may be retried for minutes (:mod:`slipstream.shared.storage.retry`). Within :func:`call_within` all tries
of all requests end by one deadline. Every try has a new connection, as a connection to a lost machine hangs for
minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from slipstream.shared.storage.base import StorageUnavailable

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
    hanging name lookup or a trickling answer. At the deadline the thread is abandoned and starts no further try.
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
