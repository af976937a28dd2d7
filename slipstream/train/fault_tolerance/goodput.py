"""Goodput: what every attempt of a run executed, how much of it was kept, and where the time went.

Each attempt has one record, ``ledger/<attempt>.json`` below the checkpoints' home. Rank 0 rewrites it every few seconds
in a background thread and once more when the attempt ends; a record without an end belongs to an attempt that was
killed. Steps are useful if no later attempt repeated them. The records are about time only, so they do not affect the
results of a run.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.artifacts.format import canonical_json
from slipstream.artifacts.records import to_json, to_tree
from slipstream.artifacts.results.bottleneck import Observed
from slipstream.artifacts.results.ledger import (
    START,
    AttemptEnd,
    AttemptRecord,
    end_key,
    read_attempts,
    record_key,
    summarise,
)
from slipstream.artifacts.results.training import Goodput
from slipstream.errors import OutOfMemory, UserError
from slipstream.logs import logger
from slipstream.storage import StorageUnavailable
from slipstream.train.checkpoint.home import Home

PERIOD_S = 5.0
#: Seconds for which the end of an attempt waits for its last record; a store that stays away is not waited for.
LAST_WRITE_S = 10.0
#: What is marked on an attempt's axis, and the most of each: then every other one is forgotten.
EVENTS = EVALUATED, SAVED = "evaluation", "checkpoint"
MOST_EVENTS = 256

LOG = logger("goodput")


def nothing() -> None:
    """Nobody observes an attempt."""


class GoodputRecorder:
    """Records this attempt. Every rank has a recorder; only rank 0's (``writes``) is stored.

    If the store is unavailable, a warning is logged and the run continues.
    """

    def __init__(self, home: Home, attempt: int, world: int, *, writes: bool, started: float) -> None:
        """``started`` is when this process began, on the clock of ``time.perf_counter``."""
        self._home, self._storage = home, home.storage
        self._writes = writes
        self._started = started
        self.record = AttemptRecord(attempt, world)
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._write_periodically, name="goodput", daemon=True)
        self.record.began_at = time.time() - (time.perf_counter() - started)
        #: Asked for what is observed by now, whenever the record is written.
        self.observe: Callable[[], Observed | None] = nothing

    def begin(self, step: int) -> None:
        """The attempt begins at ``step``. The time until now that is not yet accounted for is start-up."""
        self.record.first_step = self.record.last_step = self.record.saved_step = step
        self.record.seconds[START] = time.perf_counter() - self._started - sum(self.record.seconds.values())
        if self._writes:
            self._thread.start()

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """Add the block's wall-clock time to ``activity``, less what the block itself adds to other activities."""
        started, accounted = time.perf_counter(), sum(self.record.seconds.values())
        try:
            yield
        finally:
            self.add(activity, time.perf_counter() - started - (sum(self.record.seconds.values()) - accounted))

    def add(self, activity: str, seconds: float) -> None:
        self.record.seconds[activity] += seconds

    def event(self, kind: str) -> None:
        """One of :data:`EVENTS` ended just now."""
        self.record.saves += kind == SAVED
        times = self.record.events.setdefault(kind, [])
        times.append(round(time.perf_counter() - self._started, 3))
        if len(times) > MOST_EVENTS:
            del times[::2]

    def end(self, reason: str) -> None:
        """The attempt ends: "finished", or the reason why it stops early."""
        self.record.ended = reason
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join(LAST_WRITE_S)

    def end_of_all(self, error: Exception) -> None:
        """This rank ends alone, and with it the attempt. Rank 0, which has to find out by itself, sees but a lost peer:
        so the ledger says it beside its record."""
        reason = str(error) if isinstance(error, OutOfMemory) else f"{type(error).__name__}: {error}"
        self.end(reason)
        if not self._writes:
            try:
                self._storage.put(end_key(self.record.attempt), to_json(AttemptEnd(reason)))
            except (UserError, StorageUnavailable) as failed:
                LOG.warning("not written: %s", failed)

    def goodput(self) -> float:
        """Of this attempt so far. For other threads."""
        wall = time.perf_counter() - self._started
        return summarise([dataclasses.replace(self.record, wall=wall)]).goodput

    def summary(self) -> Goodput:
        """Of :meth:`attempts`."""
        return summarise(self.attempts())

    def attempts(self) -> list[AttemptRecord]:
        """All attempts up to now, including this one; without the earlier ones if the store is unavailable."""
        self._update()
        try:
            earlier = [record for record in read_attempts(self._storage) if record.attempt < self.record.attempt]
        except (UserError, StorageUnavailable) as error:
            LOG.warning("only this attempt is counted: %s", error)
            earlier = []
        return [*earlier, self.record]

    def _update(self) -> None:
        self.record.wall = time.perf_counter() - self._started
        try:
            observed = self.observe()
            self.record.observed = to_tree(observed) if observed else None
        except Exception as error:  # the record itself is worth more than what explains it
            LOG.warning("what is observed is not recorded: %s: %s", type(error).__name__, error)
            self.observe = nothing

    def _write_periodically(self) -> None:
        self._write()
        while not self._ended.wait(PERIOD_S):
            self._write()
        self._write()

    def _write(self) -> None:
        self._update()
        try:
            if self._home.is_inherited(self.record.attempt):
                self._ended.set()  # what is here now is a successor's
                return
            self._storage.put(record_key(self.record.attempt), canonical_json(dataclasses.asdict(self.record)))
            self._failed = False
        except (UserError, StorageUnavailable) as error:
            if not self._failed:
                LOG.warning("not written: %s", error)
            self._failed = True
