"""Goodput: the steps of every attempt, the fraction that was kept, and how time was spent.

Each attempt has one record, ``ledger/<attempt>.json`` in the checkpoint directory. Rank 0 rewrites it every few seconds
in the background and at the attempt's end; a killed attempt's record has no end. Steps are useful if no later attempt
repeated them. Records do not affect a run's results.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory
from slipstream.shared.artifacts.records import to_json, to_tree
from slipstream.shared.artifacts.results.devices import AttemptLosses
from slipstream.shared.artifacts.results.ledger import (
    START,
    AttemptEnd,
    AttemptRecord,
    end_key,
    read_attempts,
    record_key,
    summarise_goodput,
)
from slipstream.shared.artifacts.results.training import Goodput
from slipstream.shared.errors import OutOfMemory, UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import StorageUnavailable

PERIOD_S = 5.0
#: Longest wait, in seconds, for the last record to be written when an attempt ends.
LAST_WRITE_S = 10.0
#: Kinds of events whose times a record holds.
EVENTS = EVALUATED, SAVED = "evaluation", "checkpoint"
#: Maximum number of events of a kind; if there are more, every second event is dropped.
MOST_EVENTS = 256

LOG = logger("goodput")


def nothing() -> None:
    """Return None; default of :attr:`GoodputRecorder.observe`."""


class GoodputRecorder:
    """Recorder of one attempt, on every rank; only rank 0 (``writes``) stores its record.

    If the store is unavailable, it logs a warning and training continues.
    """

    def __init__(self, home: CheckpointDirectory, attempt: int, world: int, *, writes: bool, started: float) -> None:
        """Create the record; ``started`` is this process's start on the clock of ``time.perf_counter``."""
        self._home, self._storage = home, home.storage
        self._writes = writes
        self._started = started
        self.record = AttemptRecord(attempt, world)
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._write_periodically, name="goodput", daemon=True)
        self.record.began_at = time.time() - (time.perf_counter() - started)
        #: Callback that returns observations for the bottleneck diagnosis, called whenever the record is written.
        self.observe: Callable[[], AttemptLosses | None] = nothing

    def begin(self, step: int) -> None:
        """Start the attempt at ``step``; time not yet assigned to an activity counts as start-up."""
        self.record.first_step = self.record.last_step = self.record.saved_step = step
        self.record.seconds[START] = time.perf_counter() - self._started - sum(self.record.seconds.values())
        if self._writes:
            self._thread.start()

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        """Add the block's wall-clock time to ``activity``, minus time that it adds to other activities."""
        started, accounted = time.perf_counter(), sum(self.record.seconds.values())
        try:
            yield
        finally:
            self.add(activity, time.perf_counter() - started - (sum(self.record.seconds.values()) - accounted))

    def add(self, activity: str, seconds: float) -> None:
        self.record.seconds[activity] += seconds

    def event(self, kind: str) -> None:
        """Record that an event of ``kind`` (one of :data:`EVENTS`) has just ended."""
        self.record.saves += kind == SAVED
        times = self.record.events.setdefault(kind, [])
        times.append(round(time.perf_counter() - self._started, 3))
        if len(times) > MOST_EVENTS:
            del times[::2]

    def end(self, reason: str) -> None:
        """Record the end of the attempt: "finished", or why it stopped early."""
        self.record.ended = reason
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join(LAST_WRITE_S)

    def end_of_all(self, error: Exception) -> None:
        """Record an error of this rank that ends the whole attempt.

        Rank 0 only sees a lost connection. So this rank stores the reason next to rank 0's record.
        """
        reason = str(error) if isinstance(error, OutOfMemory) else f"{type(error).__name__}: {error}"
        self.end(reason)
        if not self._writes:
            try:
                self._storage.put(end_key(self.record.attempt), to_json(AttemptEnd(reason)))
            except (UserError, StorageUnavailable) as failed:
                LOG.warning("the record of this attempt could not be written: %s", failed)

    def goodput(self) -> float:
        """Return the goodput of this attempt so far; other threads may call this."""
        wall = time.perf_counter() - self._started
        return summarise_goodput([dataclasses.replace(self.record, wall=wall)]).goodput

    def summary(self) -> Goodput:
        return summarise_goodput(self.attempts())

    def attempts(self) -> list[AttemptRecord]:
        """Return the records of all attempts up to this one; of this one only if the store is unavailable."""
        self._update()
        try:
            earlier = [record for record in read_attempts(self._storage) if record.attempt < self.record.attempt]
        except (UserError, StorageUnavailable) as error:
            LOG.warning("goodput covers this attempt only: %s", error)
            earlier = []
        return [*earlier, self.record]

    def _update(self) -> None:
        self.record.wall = time.perf_counter() - self._started
        try:
            observed = self.observe()
            self.record.observed = to_tree(observed) if observed else None
        except Exception as error:  # the record is worth more than its explanation
            LOG.warning(
                "measurements for the bottleneck analysis could not be recorded (%s: %s); training is unaffected",
                type(error).__name__,
                error,
            )
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
                self._ended.set()  # the directory is a successor's now
                return
            self._storage.put(record_key(self.record.attempt), to_json(self.record))
            self._failed = False
        except (UserError, StorageUnavailable) as error:
            if not self._failed:
                LOG.warning("the record of this attempt could not be written: %s", error)
            self._failed = True
