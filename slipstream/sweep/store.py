"""The store of a sweep: what was tried, for any number of workers at once and for those that come later.

``records/sweep/`` says what the trials have in common, and when executions began; ``records/0007/`` how trial 7 went.
Records (:mod:`slipstream.sweep.records`) are put if absent, under the next number, so that workers need neither a
server nor a lock. ``trials/0007/`` has ``claims/`` and ``leases/``, by which slots take the trial one after another,
``checkpoints/`` of its training until it has ended, and of the trial with the configuration as given its ``model/``.

Whoever may write to the store may write records, too. So a trial counts only if its settings can be drawn from the
space (:func:`~slipstream.sweep.records.trials_of`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

from slipstream.artifacts.format import MANIFEST
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.models.config import ModelConfig
from slipstream.settings import to_dict, with_defaults
from slipstream.storage import AlreadyThere, MissingObject, Storage, open_reader, storage_for
from slipstream.storage.local import LocalStorage
from slipstream.sweep.records import (
    Ended,
    Identity,
    Proposed,
    Record,
    Started,
    Trial,
    decode,
    encode,
    given_of,
    trials_of,
)
from slipstream.sweep.space import Parameter
from slipstream.train.config import TrainingConfig

RECORDS, TRIALS = "records/", "trials/"
SWEEP = f"{RECORDS}sweep/"
KEY = re.compile(r"(records/(?:sweep|\d{4,})/)(\d{4,})\.json")
#: Records that are read at the same time.
READERS = 8
#: So many trials that fail at the start, before any other has ended well, are no accident.
FAILURES = 5
LOG = logger("sweep")


class SweepStore:
    """The store at an address, of a sweep that searches these parameters.

    Methods raise ``UserError`` and ``StorageUnavailable`` as the store does. For one thread at a time.
    """

    def __init__(self, address: str, parameters: Sequence[Parameter]) -> None:
        self.address = address
        self._parameters = parameters
        self.storage: Storage = storage_for(address)
        #: All records that were read, by their directories and numbers; None for what is not as it was written.
        self._read: dict[str, dict[int, Record | None]] = {}

    def open(self, identity: Identity) -> None:
        """Begin the sweep, or go on with it. Raises ``UserError`` if another one lies here."""
        there = self.identity()
        if there is None:
            self._append(SWEEP, identity)
            self._read.clear()  # of two that begin at once the first counts
            there = self.identity() or identity
        then, now = completed(there), completed(identity)
        if then != now:
            name = next(each.name for each in fields(then) if getattr(then, each.name) != getattr(now, each.name))
            what = {"data": "other data", "training": "other training settings"}.get(name, f"another {name}")
            raise UserError(f"sweep.store: {self.address} holds a sweep of {what}; choose another, or leave it empty")

    def identity(self) -> Identity | None:
        """What the trials have in common; None if there is no sweep."""
        self._read_below(SWEEP)
        return next((each for each in self._of(SWEEP) if isinstance(each, Identity)), None)

    def started(self, execution: str, now: float) -> float:
        """When this execution of the sweep began, in seconds since 1970; ``now`` if it has not."""
        self._read_below(SWEEP)
        begun = [each.at for each in self._of(SWEEP) if isinstance(each, Started) and each.execution == execution]
        if not begun:
            self._append(SWEEP, Started(execution, now))
        return min(begun, default=now)

    def trials(self) -> list[Trial]:
        """All trials, by number."""
        self._read_below(RECORDS)
        return self.known()

    def known(self) -> list[Trial]:
        """The trials as they were read or written last, without asking the store."""
        found = {number_of(directory): self._of(directory) for directory in self._read if directory != SWEEP}
        trials, ignored = trials_of(found, self._parameters)
        for number, why in ignored.items():
            warn_once(f"{self.address.rstrip('/')}/{records_of(number)}", why)
        return trials

    def append(self, trial: int, record: Record) -> None:
        """Add a record to a trial."""
        self._append(records_of(trial), record)

    def propose(self, propose: Callable[[list[Trial]], Proposed]) -> Trial | None:
        """Begin the next trial, with what ``propose`` says of those before. Returns it, or None if another worker has
        begun it meanwhile."""
        trials = self.trials()
        number = max((number_of(directory) for directory in self._read if directory != SWEEP), default=-1) + 1
        record = propose(trials)
        try:
            self.storage.create(f"{records_of(number)}0001.json", encode(record))
        except AlreadyThere:
            return None
        self._read[records_of(number)] = {1: record}
        return Trial(number, record.values)

    def _of(self, directory: str) -> list[Record]:
        read = self._read.get(directory, {})
        return [record for number in sorted(read) if (record := read[number]) is not None]

    def _read_below(self, prefix: str) -> None:
        """Read what was not read yet."""
        places = [(m[1], int(m[2])) for m in map(KEY.fullmatch, self.storage.list(prefix)) if m]
        unread = [place for place in places if place[1] not in self._read.get(place[0], {})]
        with ThreadPoolExecutor(READERS) as pool:
            for (directory, number), record in zip(unread, pool.map(self._fetch, unread), strict=True):
                self._read.setdefault(directory, {})[number] = record

    def _fetch(self, place: tuple[str, int]) -> Record | None:
        try:
            with open_reader(f"{self.storage.base}/{place[0]}{place[1]:04d}.json") as file:
                return decode(file.read())
        except MissingObject:  # deleted since it was listed
            return None

    def _append(self, directory: str, record: Record) -> None:
        read = self._read.setdefault(directory, {})
        number = max(read, default=0)
        while True:
            number += 1
            with suppress(AlreadyThere):
                self.storage.create(f"{directory}{number:04d}.json", encode(record))
                read[number] = record
                return

    def home(self, trial: int) -> str:
        """The address of a trial's claims and leases."""
        return f"{self.address.rstrip('/')}/{TRIALS}{trial:04d}"

    def checkpoints(self, trial: int) -> str:
        """The home of the checkpoints of its training."""
        return f"{self.home(trial)}/checkpoints"

    def drop_checkpoints(self, trial: int) -> None:
        """Delete what the training of a trial that has ended would have been resumed from, manifests first."""
        keys = self.storage.list(f"{TRIALS}{trial:04d}/checkpoints/")
        self.storage.delete([key for key in keys if key.endswith(f"/{MANIFEST}")])
        self.storage.delete(keys)
        if isinstance(self.storage, LocalStorage):  # what was on its way, and the lock
            shutil.rmtree(self.storage.directory / f"{TRIALS}{trial:04d}/checkpoints", ignore_errors=True)

    def model(self, trial: int) -> str:
        """Return the address of a trained model that was kept."""
        return f"{self.home(trial)}/model"

    def keep_model(self, trial: int, directory: Path, names: Iterable[str]) -> None:
        """Store a trained model, its manifest last. The files are moved; the same bytes may be there already."""
        for name in (*names, MANIFEST):
            self.storage.put(f"{TRIALS}{trial:04d}/model/{name}", directory / name)

    def keep_log(self, trial: int, log: Path) -> None:
        """Store what the process of a trial that failed has said."""
        if log.exists():
            self.storage.put(f"{TRIALS}{trial:04d}/log.txt", log.read_bytes())


def completed(identity: Identity) -> Identity:
    """It with the defaults of all settings that it does not name, as of a sweep that began before there were these."""
    model = with_defaults(to_dict(ModelConfig()), identity.model)
    training = with_defaults(to_dict(TrainingConfig()), identity.training)
    assert isinstance(model, dict) and isinstance(training, dict)
    return replace(identity, model=model, training=training)


def records_of(trial: int) -> str:
    return f"{RECORDS}{trial:04d}/"


def number_of(directory: str) -> int:
    return int(directory.split("/")[1])


@cache
def warn_once(where: str, why: str) -> None:
    """Warn of a proposal that is ignored."""
    LOG.warning("%s: %s; expected a proposal of this sweep; ignored: check who may write to this store", where, why)


def refusal(trials: list[Trial]) -> str:
    """Why a sweep is over before it has begun, as all of the first trials failed; "" if it is not."""
    given = given_of(trials)
    if given is None or any(trial.ended.state != "failed" for trial in trials if trial.ended):
        return ""
    # As long as the settings as given are being trained, others may fail.
    first = [given, *(trial for trial in trials if trial is not given)][:FAILURES]
    if len(first) < FAILURES or not given.ended or not all(trial.ended for trial in first):
        return ""
    return f"sweep: the first {FAILURES} trials failed; trial {given.number}: {given.ended.reason}"


def best_of(trials: list[Trial]) -> Trial | None:
    """The complete trial with the smallest loss, the earlier one of equals; None if none is complete."""
    complete = [trial for trial in trials if trial.ended and trial.ended.state == "complete"]
    return min(complete, key=lambda trial: (loss_of(trial.ended), trial.number), default=None)


def loss_of(ended: Ended | None) -> float:
    assert ended and ended.loss is not None, "a complete trial has a loss"
    return ended.loss
