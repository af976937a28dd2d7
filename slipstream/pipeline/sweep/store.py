"""Shared store of a sweep, for any number of concurrent and later workers.

``records/sweep/`` holds the identity of the sweep and the starts of executions; ``records/0007/`` the records of trial
7. A record (:mod:`slipstream.pipeline.sweep.records`) is created under the next free number if absent, so workers need
neither a server nor a lock. ``trials/0007/`` has ``claims/`` and ``leases/``, which limit trial 7 to one worker at a
time, and ``checkpoints/`` of its training until it ends. The unchanged configuration's trial also has ``model/``.

Anyone with write access to the store may write records. So a trial counts only if its settings can be drawn from the
space (:func:`~slipstream.pipeline.sweep.records.assemble_trials`).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from filelock import FileLock

from slipstream.pipeline.sweep.records import (
    ExecutionStarted,
    Record,
    SweepIdentity,
    TrialEnded,
    TrialHistory,
    TrialProposed,
    assemble_trials,
    decode_sweep_record,
    encode_record,
    unchanged_trial,
)
from slipstream.pipeline.sweep.space import SearchedParameter
from slipstream.pipeline.train.checkpoint.home import CLAIMS, CheckpointDirectory, newest_attempt
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, Lease, LeaseObserver, process_lock, within_timeout
from slipstream.pipeline.train.config import NO_LONGER_LASTING, TrainingConfig, first_difference
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.artifacts.records import LARGEST_RECORD
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.settings import to_dict, with_defaults
from slipstream.shared.storage import MissingObject, Storage, create_next, open_reader, storage_for, try_create
from slipstream.shared.storage.local import LocalStorage
from slipstream.shared.storage.names import number_as_name, number_in_name

RECORDS, TRIALS = "records/", "trials/"
SWEEP = f"{RECORDS}sweep/"
KEY = re.compile(rf"({RECORDS}([^/]+)/)([^/]+)\.json")
#: Number of records read concurrently.
READERS = 8
#: A sweep ends if this many first trials fail before any other ends.
FAILURES = 5
LOG = logger("sweep")


class SweepStore:
    """Store of a sweep over ``parameters``; not thread-safe.

    Methods raise ``UserError`` and ``StorageUnavailable`` as the storage does.
    """

    def __init__(self, address: str, parameters: Sequence[SearchedParameter]) -> None:
        self.address = address
        self._parameters = parameters
        self.storage: Storage = storage_for(address)
        #: All records read, by directory and number; None for invalid ones.
        self._read: dict[str, dict[int, Record | None]] = {}

    def open(self, identity: SweepIdentity) -> None:
        """Start or resume the sweep.

        Raises ``UserError`` if the store holds another sweep.
        """
        there = self.identity()
        if there is None:
            self._append(SWEEP, identity)
            self._read.clear()  # if two start at once, the first counts
            there = self.identity() or identity
        then, now = with_default_settings(there), with_default_settings(identity)
        found = first_difference(vars(then), vars(now), ignored=NO_LONGER_LASTING)
        if found:
            name = found[0].partition(".")[0]
            what = {"data": "other data", "training": "other training settings"}.get(name, f"another {name}")
            raise UserError(f"sweep.store: {self.address} holds a sweep of {what}; choose another, or leave it empty")

    def identity(self) -> SweepIdentity | None:
        """Return the identity of the sweep in the store; None if it is new."""
        self._read_below(SWEEP)
        return next((each for each in self._of(SWEEP) if isinstance(each, SweepIdentity)), None)

    def started(self, execution: str, now: float) -> float:
        """Return the start of this execution in seconds since 1970; record ``now`` if it has none."""
        self._read_below(SWEEP)
        begun = [
            each.at for each in self._of(SWEEP) if isinstance(each, ExecutionStarted) and each.execution == execution
        ]
        if not begun:
            self._append(SWEEP, ExecutionStarted(execution, now))
        return min(begun, default=now)

    def trials(self) -> list[TrialHistory]:
        """Return all trials, by number, including new records."""
        self._read_below(RECORDS)
        return self.known()

    def known(self) -> list[TrialHistory]:
        """Return the trials known so far, without accessing the store."""
        found = {number_of(directory): self._of(directory) for directory in self._read if directory != SWEEP}
        trials, ignored = assemble_trials(found, self._parameters)
        for number, why in ignored.items():
            warn_once(f"{self.address.rstrip('/')}/{records_of(number)}", why)
        return trials

    def append(self, trial: int, record: Record) -> None:
        self._append(records_of(trial), record)

    def propose(self, propose: Callable[[list[TrialHistory]], TrialProposed]) -> TrialHistory | None:
        """Start and return the next trial; None if another worker started it first.

        ``propose`` chooses its values, given all trials.
        """
        trials = self.trials()
        number = max((number_of(directory) for directory in self._read if directory != SWEEP), default=-1) + 1
        record = propose(trials)
        if not try_create(self.storage, f"{records_of(number)}0001.json", encode_record(record)):
            return None
        self._read[records_of(number)] = {1: record}
        return TrialHistory(number, record.values)

    def _of(self, directory: str) -> list[Record]:
        read = self._read.get(directory, {})
        return [record for number in sorted(read) if (record := read[number]) is not None]

    def _read_below(self, prefix: str) -> None:
        """Read all new records below ``prefix``."""
        places = list(filter(None, map(parse_record_key, self.storage.list(prefix))))
        unread = [place for place in places if place[1] not in self._read.get(place[0], {})]
        with ThreadPoolExecutor(READERS) as pool:
            for (directory, number), record in zip(unread, pool.map(self._fetch, unread), strict=True):
                self._read.setdefault(directory, {})[number] = record

    def _fetch(self, place: tuple[str, int]) -> Record | None:
        try:
            with open_reader(f"{self.storage.base}/{place[0]}{place[1]:04d}.json") as file:
                return decode_sweep_record(file.read(LARGEST_RECORD + 1))
        except MissingObject:  # deleted since the listing
            return None

    def _append(self, directory: str, record: Record) -> None:
        read = self._read.setdefault(directory, {})
        key, content = f"{directory}{{:04d}}.json".format, encode_record(record)
        read[create_next(self.storage, key, lambda _: content, max(read, default=0) + 1)] = record

    def home(self, trial: int) -> str:
        """Return the address of a trial's claims and leases."""
        return f"{self.address.rstrip('/')}/{TRIALS}{trial:04d}"

    def checkpoints(self, trial: int) -> str:
        return f"{self.home(trial)}/checkpoints"

    def drop_checkpoints(self, trial: int) -> None:
        """Delete the checkpoints of an ended trial, manifests first."""
        keys = self.storage.list(f"{TRIALS}{trial:04d}/checkpoints/")
        self.storage.delete([key for key in keys if key.endswith(f"/{MANIFEST}")])
        self.storage.delete(keys)
        if isinstance(self.storage, LocalStorage):  # unfinished files and the lock
            shutil.rmtree(self.storage.directory / f"{TRIALS}{trial:04d}/checkpoints", ignore_errors=True)

    def model(self, trial: int) -> str:
        """Return the address of a trial's stored model."""
        return f"{self.home(trial)}/model"

    def keep_model(self, trial: int, directory: Path, names: Iterable[str]) -> None:
        """Store a trained model, with its manifest last.

        Files are moved from ``directory``; the store may already have equal ones.
        """
        for name in (*names, MANIFEST):
            self.storage.put(f"{TRIALS}{trial:04d}/model/{name}", directory / name)

    def keep_log(self, trial: int, log: Path) -> None:
        """Store the log of a failed trial's process."""
        if log.exists():
            self.storage.put(f"{TRIALS}{trial:04d}/log.txt", log.read_bytes())


def with_default_settings(identity: SweepIdentity) -> SweepIdentity:
    model = with_defaults(to_dict(ModelConfig()), identity.model)
    training = with_defaults(to_dict(TrainingConfig()), identity.training)
    assert isinstance(model, dict) and isinstance(training, dict)
    return replace(identity, model=model, training=training)


def records_of(trial: int) -> str:
    return f"{RECORDS}{number_as_name(trial, 4)}/"


def parse_record_key(key: str) -> tuple[str, int] | None:
    """Return the directory and number of a record's key; None for other keys."""
    match = KEY.fullmatch(key)
    if not match or (f"{RECORDS}{match[2]}/" != SWEEP and number_in_name(match[2], 4) is None):
        return None
    number = number_in_name(match[3], 4)
    return None if number is None else (match[1], number)


def number_of(directory: str) -> int:
    return int(directory.split("/")[1])


@cache
def warn_once(where: str, why: str) -> None:
    LOG.warning(
        "%s: %s; expected a proposal of this sweep; it is ignored: check who may write to this store", where, why
    )


def early_end_reason(trials: list[TrialHistory]) -> str:
    """Return why the sweep must end, if its first trials all failed; "" otherwise."""
    given = unchanged_trial(trials)
    if given is None or any(trial.ended.state != "failed" for trial in trials if trial.ended):
        return ""
    # While the settings as given are in training, others may fail.
    first = [given, *(trial for trial in trials if trial is not given)][:FAILURES]
    if len(first) < FAILURES or not given.ended or not all(trial.ended for trial in first):
        return ""
    return f"sweep: the first {FAILURES} trials failed; trial {given.number}: {given.ended.reason}"


def best_trial(trials: list[TrialHistory]) -> TrialHistory | None:
    """Return the complete trial with the smallest loss, or None.

    If losses are equal, the earlier trial wins.
    """
    complete = [trial for trial in trials if trial.ended and trial.ended.state == "complete"]
    return min(complete, key=lambda trial: (loss_of(trial.ended), trial.number), default=None)


def loss_of(ended: TrialEnded | None) -> float:
    assert ended and ended.loss is not None, "a complete trial has a loss"
    return ended.loss


#: Attempts to take a local lock, and the pause between them in seconds. Another process may hold the lock briefly just
#: to see whether it is free.
LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 0.02
#: Minimum seconds between two reads of a running trial's lease in a remote store; several fit into the heartbeat
#: timeout.
GLANCE_S = 10.0


@dataclass(frozen=True)
class ObservedTrial:
    """Number of a trial's last attempt, and whether it is running, at time ``at`` (``time.monotonic``).

    ``held`` is None until a heartbeat, or its absence, shows whether the trial is running.
    """

    attempt: int
    held: bool | None
    at: float


@dataclass
class OccupiedSlots:
    """Record of the trials that the worker ``holder`` runs."""

    store: SweepStore
    holder: Holder
    #: By trial number.
    watches: dict[int, LeaseObserver] = field(default_factory=dict)
    seen: dict[int, ObservedTrial] = field(default_factory=dict)

    def look(self, trial: int) -> ObservedTrial:
        """Return whether another worker is running a trial.

        Remote stores are read only every :data:`GLANCE_S`, since hundreds of trials may be running.
        """
        before, now = self.seen.get(trial), time.monotonic()
        if before and before.held is not False and now - before.at < GLANCE_S:
            return before
        home = CheckpointDirectory(storage_for(self.store.home(trial)))
        self.seen[trial] = within_timeout(home, Heartbeat().silence_s, lambda: self._look(trial, home, now))
        return self.seen[trial]

    def _look(self, trial: int, home: CheckpointDirectory, now: float) -> ObservedTrial:
        attempt = newest_attempt(home.storage.list(CLAIMS))
        watch = self.watches.setdefault(trial, LeaseObserver(home))
        seen = watch.look()
        if seen is None or self.holder.succeeds(home.holder_of(seen[0])):
            return ObservedTrial(attempt, held=False, at=now)
        if home.is_local:  # where a look costs nothing
            return ObservedTrial(attempt, held=True, at=now - GLANCE_S)
        return ObservedTrial(attempt, held=True if watch.alive else None, at=now)

    def take(self, trial: int, after: int, leaving: Callable[[], bool], lost: Callable[[str], None]) -> Lease | None:
        """Start the attempt after the attempt number ``after``; None if another worker was first.

        ``leaving`` and ``lost`` are passed to :class:`Lease`.
        """
        home = CheckpointDirectory(storage_for(self.store.home(trial)))
        lock = lock_of(home)
        taken = False
        try:
            taken = within_timeout(home, Heartbeat().silence_s, lambda: home.claim_exactly(after + 1, self.holder))
            return Lease(home, after + 1, leaving, lost, lock=lock) if taken else None
        finally:
            if lock is not None and not taken:
                lock.release()


def lock_of(home: CheckpointDirectory) -> FileLock | None:
    for _ in range(LOCK_ATTEMPTS if home.is_local else 1):
        if lock := process_lock(home.storage):
            return lock
        time.sleep(LOCK_PAUSE_S)
    return None
