"""Checkpoint directory of one training: its attempts, and the checkpoints that may be restored.

Two attempts may be alive at once. One may be in its grace period, or on a machine that the cluster has given up, while
its successor runs. Or two executions run the same training. Stores have no locks, but they can create an object only if
it is absent, and a listing contains all earlier objects. The protocol uses these two operations:

1. An attempt *announces* a save, then looks for claims of later attempts, and starts the save only if there is none. It
   likewise announces its shutdown, and may then start its last save even after a successor's claim.
2. A successor *claims* the next number, then looks for announcements, and waits for the announced saves. So it learns
   of every save that starts before its claim, and no other starts afterwards.
3. It then *inherits*: it records which checkpoints are complete. From then on no other checkpoints of earlier attempts
   count, so a checkpoint that one of these completes later is never restored.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.artifacts.records import LARGEST_RECORD, Extra, decode_record, to_json
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import Interrupted, UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import (
    MissingObject,
    Replaced,
    Storage,
    StorageUnavailable,
    create_next,
    open_reader,
    try_create,
)
from slipstream.shared.storage.local import LocalStorage
from slipstream.shared.storage.names import number_as_name, number_in_name

#: Pointer to the newest checkpoint for people and other programs; a restore uses manifests only.
LATEST = "latest.json"
#: Number of micro-batches that "auto" found, or that replaces the setting after lack of memory.
DECISION = "accumulation.json"
#: Record of a finished training, with the address of the trained model.
FINISHED = "finished.json"
#: Claims of attempts: ``claims/0003`` identifies attempt 3.
CLAIMS = "claims/"
#: Lists of inherited checkpoints: ``inherited/0003.json`` has those that attempt 3 found.
INHERITED = "inherited/"
#: Heartbeats: ``leases/0003.json`` is that of attempt 3.
LEASES = "leases/"
#: Checkpoints: ``step-000000001200.a0003/`` is that of step 1200 by attempt 3. It is complete once its
#: ``manifest.json`` exists, which is written last. A name is never used twice.
CHECKPOINTS = "step-"
PATTERN = re.compile(r"step-([0-9]{12})\.a([0-9]+)")

#: Retries of a read during which the object was replaced, as leases are every few seconds.
REPLACED = 5

LOG = logger("checkpoint")
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Name of a checkpoint, ordered by age.

    A later attempt's checkpoint is newer, whatever its step.
    """

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.a{self.attempt:04d}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        match = PATTERN.fullmatch(text)
        attempt = number_in_name(match[2], 4) if match else None
        return cls(attempt, int(match[1])) if match and attempt is not None else None


@dataclass(frozen=True)
class Retention:
    """Checkpoints to retain.

    The newest ``last``, and the newest whose step is a multiple of ``regular`` (0: none).
    """

    last: int = 2
    regular: int = 0

    def expired(self, names: Iterable[CheckpointName]) -> list[CheckpointName]:
        """Return the ``names`` to delete, newest first."""
        newest_first = sorted(names, reverse=True)
        retained = set(newest_first[: self.last])
        if self.regular:
            retained.update([name for name in newest_first if name.step % self.regular == 0][:1])
        return [name for name in newest_first if name not in retained]


def complete_checkpoints(keys: Iterable[str]) -> list[CheckpointName]:
    """Return the checkpoints that have a manifest among a store's ``keys``, newest first.

    A manifest without other files does not count: it was written after the checkpoint's deletion.
    """
    files: dict[str, set[str]] = {}
    for key in keys:
        directory, _, file = key.partition("/")
        files.setdefault(directory, set()).add(file)
    whole = [directory for directory, of in files.items() if MANIFEST in of and len(of) > 1]
    return sorted((name for name in map(CheckpointName.parse, whole) if name), reverse=True)


def number_of(key: str, prefix: str) -> int:
    """Return the attempt number in a key below ``prefix``; 0 if there is none."""
    digits = key.removeprefix(prefix).removesuffix(".json")
    return number_in_name(digits, 4) or 0 if key.startswith(prefix) else 0


def newest_attempt(keys: Iterable[str], prefix: str = CLAIMS) -> int:
    """Return the highest attempt number among the ``keys`` below ``prefix``; 0 if there is none."""
    return max((number_of(key, prefix) for key in keys), default=0)


def claim_key(attempt: int) -> str:
    return f"{CLAIMS}{number_as_name(attempt, 4)}"


def claim_of(attempt: int, holder: Holder) -> bytes:
    return to_json(AttemptClaim(attempt, uuid.uuid4().hex, holder))


def inherited_key(attempt: int) -> str:
    return f"{INHERITED}{number_as_name(attempt, 4)}.json"


def lease_key(attempt: int) -> str:
    return f"{LEASES}{number_as_name(attempt, 4)}.json"


class Superseded(Interrupted):
    """Raised if a later attempt has taken over the checkpoint directory, so that this attempt must stop."""


@dataclass(frozen=True)
class AttemptClaim:
    """Record of an attempt's start; a random ``claim`` makes its bytes unique."""

    attempt: int
    claim: str
    holder: Holder


@dataclass(frozen=True)
class InheritedCheckpoints:
    """Record of the earlier attempts' checkpoints that ``attempt`` and its successors may restore."""

    attempt: int
    checkpoints: list[str]


@dataclass(frozen=True)
class FinishedTraining:
    """Record of a finished training: its last holder, and the address of the trained model."""

    holder: Holder
    artifact: str
    #: Code version that finished the training; "" in records of older releases.
    code: str = ""


class CheckpointDirectory:
    """Checkpoint directory of one training, in a store or on a local disk.

    Methods raise ``UserError`` and ``StorageUnavailable`` as the store does. An object with unexpected content counts
    as absent.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def is_local(self) -> bool:
        return isinstance(self.storage, LocalStorage)

    def read(self, key: str, kind: type[T], *, extra: Extra = "forbid") -> T | None:
        """Return the record at ``key``, of the type ``kind``; None if it is absent or malformed."""
        content = self.read_bytes(key, LARGEST_RECORD + 1)
        return None if content is None else decode_record(content, kind, extra=extra)

    def read_bytes(self, key: str, most: int = -1) -> bytes | None:
        """Return the first ``most`` bytes of an object, by default all; None if it is absent."""
        for last in (False,) * REPLACED + (True,):
            try:
                with open_reader(f"{self.storage.base}/{key}") as file:
                    return file.read(most)
            except MissingObject:
                break
            except Replaced:
                if last:
                    raise
        return None

    # Attempts

    def claim(self, holder: Holder) -> int:
        """Start the next attempt, exclusively, and return its number; the first is 1."""
        following = newest_attempt(self.storage.list(CLAIMS)) + 1
        return create_next(self.storage, claim_key, lambda attempt: claim_of(attempt, holder), following)

    def claim_exactly(self, attempt: int, holder: Holder) -> bool:
        """Start attempt number ``attempt``; return False if another process has already started it."""
        return try_create(self.storage, claim_key(attempt), claim_of(attempt, holder))

    def holder_of(self, attempt: int) -> Holder:
        """Return the execution that claimed an attempt; an empty ``Holder`` if the claim is damaged."""
        claim = self.read(claim_key(attempt), AttemptClaim, extra="ignore")
        return claim.holder if claim else Holder()

    def check_claim(self, attempt: int) -> None:
        """Raise :class:`Superseded` if a later attempt has started, or if this claim was deleted."""
        last = newest_attempt(self.storage.list(CLAIMS))
        if last > attempt:
            raise Superseded(
                f"{self.storage.base}: attempt {last} has taken over this checkpoint directory "
                f"({self.holder_of(last)}); attempt {attempt} stops"
            )
        if last < attempt:
            raise Superseded(f"{self.storage.base}: the claim of attempt {attempt} was deleted; the attempt stops")

    # Checkpoints

    def checkpoints(self) -> list[CheckpointName]:
        """Return the complete checkpoints that may be restored, newest first."""
        return self._counting(self.storage.list(CHECKPOINTS))

    def _counting(self, keys: Sequence[str]) -> list[CheckpointName]:
        last = newest_attempt(self.storage.list(INHERITED), INHERITED)
        record = self.read(inherited_key(last), InheritedCheckpoints, extra="ignore") if last else None
        inherited = record.checkpoints if record else ()
        return [name for name in complete_checkpoints(keys) if name.attempt >= last or str(name) in inherited]

    def inherit(self, attempt: int) -> list[CheckpointName]:
        """Record which checkpoints ``attempt`` may restore, and return them, newest first.

        ``attempt`` must have claimed the directory. All other files of earlier attempts' checkpoints are deleted.
        """
        keys = self.storage.list(CHECKPOINTS)
        counting = self._counting(keys)
        names = {str(name) for name in counting}
        self.storage.create(inherited_key(attempt), to_json(InheritedCheckpoints(attempt, sorted(names))))
        with not_needed():
            self.storage.delete(left_behind(keys, names, attempt))
        return counting

    def is_inherited(self, attempt: int) -> bool:
        """Return True if an attempt after ``attempt`` has already listed the checkpoints to restore."""
        return newest_attempt(self.storage.list(INHERITED), INHERITED) > attempt

    # End of the training

    def finish(self, holder: Holder, artifact: str, code: str) -> None:
        """Record the address of the trained model, and delete all unneeded files.

        Does nothing if another attempt has taken over the directory.
        """
        if self.holder_of(newest_attempt(self.storage.list(CLAIMS))) != holder:
            return
        self.storage.put(FINISHED, to_json(FinishedTraining(holder, artifact, code)))
        with not_needed():
            self.sweep()

    def finished(self) -> FinishedTraining | None:
        return self.read(FINISHED, FinishedTraining, extra="ignore")

    def reopen(self) -> None:
        """Delete a finished training's record and files, so that it can start over."""
        self.sweep()
        self.storage.delete([FINISHED])

    def sweep(self) -> None:
        """Delete all but the finish record, the last claim and the last list of inherited checkpoints.

        Attempt numbers are never reused, so running superseded attempts stay superseded.
        """
        keys = self.storage.list()
        kept = {FINISHED, claim_key(newest_attempt(keys)), inherited_key(newest_attempt(keys, INHERITED))}
        checkpoints = [key for key in keys if key.startswith(CHECKPOINTS)]
        # Manifests first: an interrupted sweep leaves no checkpoint that looks complete.
        self.storage.delete([f"{name}/{MANIFEST}" for name in complete_checkpoints(checkpoints)])
        self.storage.delete([key for key in keys if key not in kept])


@contextmanager
def not_needed() -> Iterator[None]:
    """Log errors of an optional deletion as warnings."""
    try:
        yield
    except (UserError, StorageUnavailable) as error:
        LOG.warning("unneeded files could not be deleted (%s); they take up space until a later deletion", error)


def left_behind(keys: Iterable[str], names: set[str], attempt: int) -> list[str]:
    """Return the keys of attempts before ``attempt`` whose checkpoints are not in ``names``."""
    parsed = ((key, CheckpointName.parse(key.partition("/")[0])) for key in keys)
    return [key for key, name in parsed if name and name.attempt < attempt and str(name) not in names]
