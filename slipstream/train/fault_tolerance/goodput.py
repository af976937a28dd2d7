"""Goodput: what every attempt of a run executed, how much of it was kept, and where the time went.

Each attempt has one record, ``ledger/<attempt>.json`` below the checkpoints' home. Rank 0 rewrites it every few seconds
in a background thread and once more when the attempt ends; a record without an end belongs to an attempt that was
killed. Steps are useful if no later attempt repeated them. The records are about time only, so they do not affect the
results of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.artifacts.format import DamagedArtifact, canonical_json
from slipstream.artifacts.records import from_tree, to_tree
from slipstream.artifacts.results.bottleneck import Observed
from slipstream.artifacts.results.training import Goodput
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import Storage, StorageUnavailable
from slipstream.train.checkpoint.home import Home

PREFIX = "ledger/"
PERIOD_S = 5.0
#: Seconds for which the end of an attempt waits for its last record; a store that stays away is not waited for.
LAST_WRITE_S = 10.0
#: Activities that the time of an attempt is spent on; the rest of the wall-clock time is idle or unaccounted for.
START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL = "start", "restore", "steps", "evaluation", "data_wait", "stall"
ACTIVITIES = (START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL)
#: What is marked on an attempt's axis, and the most of each: then every other one is forgotten.
EVENTS = EVALUATED, SAVED = "evaluation", "checkpoint"
MOST_EVENTS = 256
#: The end of an attempt that did not record one.
KILLED = "killed, or its machine was lost"

LOG = logger("goodput")


@dataclass
class AttemptRecord:
    """One attempt. ``first_step`` and ``last_step`` count the finished steps at its start and now."""

    attempt: int
    world: int
    first_step: int = 0
    last_step: int = 0
    #: The step of the last checkpoint that it published.
    saved_step: int = 0
    #: Seconds by activity.
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    #: Wall-clock seconds of the attempt so far.
    wall: float = 0.0
    ended: str = KILLED
    #: When it began, in seconds since 1970, UTC; 0 in records from before this was written down.
    began_at: float = 0.0
    #: Rank 0's machine and device, and whether the machine may be taken away; None where nobody says.
    node: str = ""
    device: str = ""
    spot: bool | None = None
    #: Seconds since it began at which an evaluation or a checkpoint ended, by :data:`EVENTS`.
    events: dict[str, list[float]] = field(default_factory=dict)
    #: :class:`.Observed` as a tree; None before the first step.
    observed: dict[str, Any] | None = None

    @property
    def executed(self) -> int:
        return self.last_step - self.first_step


def summarise(attempts: Sequence[AttemptRecord]) -> Goodput:
    """Add up the records of all attempts of a run. Steps that a later attempt repeated are not kept."""
    ordered = sorted((dataclasses.replace(record) for record in attempts), key=lambda record: record.attempt)
    for record, following in pairwise(ordered):
        # The record of a killed attempt is seconds old, but the attempt got at least to where the next one resumed.
        record.last_step = max(record.last_step, following.first_step)
    useful = useful_steps(ordered)
    kept, lost = sum(useful), sum(lost_of(record, its) for record, its in zip(ordered, useful, strict=True))
    executed, wall = sum(record.executed for record in ordered), sum(record.wall for record in ordered)
    seconds = {name: sum(record.seconds[name] for record in ordered) for name in ACTIVITIES}
    return Goodput(
        attempts=len(ordered),
        executed=executed,
        kept=kept,
        seconds=seconds,
        lost=lost,
        wall=wall,
        ends=tuple(record.ended for record in ordered),
        useful_steps=kept / executed if executed else 1.0,
        goodput=max(0.0, seconds[STEPS] - lost) / wall if wall else 1.0,
    )


def nothing() -> None:
    """Nobody observes an attempt."""


def useful_steps(ordered: Sequence[AttemptRecord]) -> list[int]:
    """Of each attempt, oldest first, the steps that no later one repeated: those before the earliest start of any."""
    useful = []
    for index, record in enumerate(ordered):
        repeated_from = min([later.first_step for later in ordered[index + 1 :]], default=record.last_step)
        useful.append(max(0, min(record.last_step, repeated_from) - record.first_step))
    return useful


def lost_of(record: AttemptRecord, useful: int) -> float:
    """Seconds of the steps of an attempt that are not among its ``useful`` ones."""
    return record.seconds[STEPS] * (record.executed - useful) / record.executed if record.executed else 0.0


def lost_seconds(ordered: Sequence[AttemptRecord]) -> list[float]:
    """Of each attempt, oldest first, seconds of steps that a later one repeated."""
    return [lost_of(record, useful) for record, useful in zip(ordered, useful_steps(ordered), strict=True)]


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
            key = f"{PREFIX}{self.record.attempt:04d}.json"
            self._storage.put(key, canonical_json(dataclasses.asdict(self.record)))
            self._failed = False
        except (UserError, StorageUnavailable) as error:
            if not self._failed:
                LOG.warning("not written: %s", error)
            self._failed = True


def read_attempts(storage: Storage) -> list[AttemptRecord]:
    """The records of all attempts in a home, oldest first. Unreadable ones are skipped with a warning."""
    records = []
    with tempfile.TemporaryDirectory(prefix="ledger-") as temporary:
        for key in storage.list(PREFIX):
            try:
                records.append(record_of(json.loads(storage.get(key, Path(temporary)).read_bytes())))
            except (ValueError, TypeError, AttributeError):
                LOG.warning("%s/%s: not the record of an attempt; skipped", storage.base, key)
    return sorted(records, key=lambda record: record.attempt)


def record_of(values: Mapping[str, Any]) -> AttemptRecord:
    """The record that these values are, whatever version of this project wrote it: what is new to it is left out, what
    it knows and they lack is as in one without. Raises ``TypeError`` and ``ValueError`` if they are none."""
    known = {name for name in values if name in AttemptRecord.__dataclass_fields__}
    record = AttemptRecord(**{name: values[name] for name in known})
    seconds = {name: float(record.seconds.get(name, 0.0)) for name in ACTIVITIES}
    return dataclasses.replace(record, seconds=seconds)


def observed_in(attempts: Sequence[AttemptRecord]) -> list[Observed]:
    """What the attempts observed, without those that a later version of this project describes in another way."""
    found = []
    for attempt in attempts:
        if attempt.observed is not None:
            with contextlib.suppress(DamagedArtifact):
                found.append(from_tree(attempt.observed, Observed, f"attempt {attempt.attempt}"))
    return found
