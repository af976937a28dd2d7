"""Time limits of requests that must end soon, such as those of heartbeats.

A data request may be tried for minutes (:mod:`slipstream.storage.retry`). Within :func:`within` all tries of all
requests end by one deadline, and every try has a connection of its own: a connection to a machine that has gone is
silent for minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from slipstream.storage.base import StorageUnavailable

T = TypeVar("T")
#: A try has the time that is left; more than this share of the whole only if no other try could follow.
SHARE = 0.5
#: Seconds that even the last try has.
SHORTEST_TRY_S = 0.01


@dataclass(frozen=True)
class Limit:
    """The time that the requests of one call have."""

    seconds: float
    #: When they must have ended, on the clock of ``time.monotonic``.
    ends: float

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    @property
    def try_s(self) -> float:
        """Seconds after which a try that begins now is given up."""
        return max(SHORTEST_TRY_S, min(self.remaining_s, SHARE * self.seconds))


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


def current_limit() -> Limit | None:
    """Return the limit of the requests of this thread; None if they are data requests."""
    return _limit.get()


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, whose requests to a store have ``seconds`` in all, or less if the caller has.

    Raises ``StorageUnavailable`` at the end of that time at the latest. ``work`` runs in a thread of its own, since no
    timeout of a socket ends a name server that hangs or an answer that trickles. Such a thread is left behind; it
    begins no further try.
    """
    limit, outer = Limit(seconds, time.monotonic() + seconds), current_limit()
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
    except RuntimeError as error:  # the pod may have no more threads
        raise StorageUnavailable(f"no request could be made ({error})") from None
    try:
        return outcome.result(limit.remaining_s)
    except TimeoutError:
        if outcome.done():  # it is the error of the work
            raise
        raise StorageUnavailable(f"the store did not answer within {limit.seconds:g} s") from None
