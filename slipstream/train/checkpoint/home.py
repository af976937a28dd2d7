"""The home of one training's checkpoints: who works in it, and which checkpoints count.

Two attempts may be alive at once: one in the grace period before its end, or on a machine that the cluster has given
up, and its successor; or two executions of the same training. Stores have no locks, but put an object only if it is
absent, and list what was put before. From these two:

1. An attempt *announces* a save, then looks for claims of later attempts, and begins only if there is none. In the same
   way it announces that its end is near, and then may begin its last save later.
2. A successor *claims* the next number, then looks for announcements, and waits for what is announced.
   So it learns of every save that is begun before its claim, and no other is begun afterwards.
3. It then *inherits*: it records which checkpoints are complete. Of those of earlier attempts only these count from
   then on, so what an attempt still writes after its successor has restored is never restored.

Its files: ``step-000000001200.a0003/`` is one checkpoint: step 1200, written by attempt 3. It is complete once its
``manifest.json`` exists, which is written last; a name is never used twice. ``claims/0003`` says who the third attempt
is. ``inherited/0003.json`` lists the checkpoints that it found then. ``leases/0003.json`` is its sign of life.
``accumulation.json`` is a number of micro-batches that was found, instead of the settings' or for "auto".
``finished.json`` says where the trained model lies. ``latest.json`` is for people and other programs; a restore uses
manifests only.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from slipstream.artifacts.format import MANIFEST
from slipstream.artifacts.homes import Holder
from slipstream.artifacts.records import LARGEST_RECORD, Extra, decode_record, to_json
from slipstream.errors import Interrupted, UserError
from slipstream.logs import logger
from slipstream.storage import AlreadyThere, MissingObject, Replaced, Storage, StorageUnavailable, open_reader
from slipstream.storage.local import LocalStorage
from slipstream.storage.names import number_as_name, number_in_name

LATEST = "latest.json"
DECISION = "accumulation.json"
FINISHED = "finished.json"
CLAIMS = "claims/"
INHERITED = "inherited/"
LEASES = "leases/"
CHECKPOINTS = "step-"
PATTERN = re.compile(r"step-([0-9]{12})\.a([0-9]+)")

#: How often an object may be replaced while it is read: leases are, every few seconds.
REPLACED = 5

LOG = logger("checkpoint")
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Name:
    """The name of a checkpoint. Names are ordered by age: a later attempt's is newer, whatever its step."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.a{self.attempt:04d}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        match = PATTERN.fullmatch(text)
        attempt = number_in_name(match[2], 4) if match else None
        return cls(attempt, int(match[1])) if match and attempt is not None else None


@dataclass(frozen=True)
class Retention:
    """The checkpoints to retain: the newest ``last``, and the newest of a ``regular``-th step (0: none)."""

    last: int = 2
    regular: int = 0

    def expired(self, names: Iterable[Name]) -> list[Name]:
        """Those of ``names`` to delete, newest first."""
        newest_first = sorted(names, reverse=True)
        retained = set(newest_first[: self.last])
        if self.regular:
            retained.update([name for name in newest_first if name.step % self.regular == 0][:1])
        return [name for name in newest_first if name not in retained]


def complete(keys: Iterable[str]) -> list[Name]:
    """The checkpoints that have a manifest among a store's ``keys``, newest first. A manifest alone is none: it comes
    from a request that arrived once the checkpoint had been deleted."""
    files: dict[str, set[str]] = {}
    for key in keys:
        directory, _, file = key.partition("/")
        files.setdefault(directory, set()).add(file)
    whole = [directory for directory, of in files.items() if MANIFEST in of and len(of) > 1]
    return sorted((name for name in map(Name.parse, whole) if name), reverse=True)


def number_of(key: str, prefix: str) -> int:
    """The attempt that a key below ``prefix`` is of; 0 if it is of none."""
    digits = key.removeprefix(prefix).removesuffix(".json")
    return number_in_name(digits, 4) or 0 if key.startswith(prefix) else 0


def newest(keys: Iterable[str], prefix: str = CLAIMS) -> int:
    """The highest attempt among the ``keys`` below ``prefix``; 0 if there is none."""
    return max((number_of(key, prefix) for key in keys), default=0)


def claim_key(attempt: int) -> str:
    return f"{CLAIMS}{number_as_name(attempt, 4)}"


def inherited_key(attempt: int) -> str:
    return f"{INHERITED}{number_as_name(attempt, 4)}.json"


def lease_key(attempt: int) -> str:
    return f"{LEASES}{number_as_name(attempt, 4)}.json"


class Superseded(Interrupted):
    """A later attempt works in the home, so this one must stop."""


@dataclass(frozen=True)
class Claim:
    """The record of an attempt. A random ``claim`` makes its bytes unique."""

    attempt: int
    claim: str
    holder: Holder


@dataclass(frozen=True)
class Inherited:
    """The record of an attempt that has listed the checkpoints of earlier ones: the names of those that count."""

    attempt: int
    checkpoints: list[str]


@dataclass(frozen=True)
class Finished:
    """The end of a training: who finished it, and where its trained model lies."""

    holder: Holder
    artifact: str
    #: The code version of the stage that finished it; "" in records of older releases.
    code: str = ""


class Home:
    """The home of the checkpoints of one training, in a store. Methods raise ``UserError`` and ``StorageUnavailable``
    as the store does; an object that is not what was written counts as absent."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    @property
    def is_local(self) -> bool:
        return isinstance(self.storage, LocalStorage)

    def read(self, key: str, kind: type[T], *, extra: Extra = "forbid") -> T | None:
        """Return the record of the type ``kind``; None if there is none, or something else."""
        content = self.read_bytes(key, LARGEST_RECORD + 1)
        return None if content is None else decode_record(content, kind, extra=extra)

    def read_bytes(self, key: str, most: int = -1) -> bytes | None:
        """Return the first ``most`` bytes of an object, by default all; None if there is none."""
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

    # Who works here

    def claim(self, holder: Holder) -> int:
        """Begin the next attempt, which no other then is. Returns its number, from 1."""
        attempt = 0
        while True:
            attempt = max(attempt, newest(self.storage.list(CLAIMS))) + 1
            if self.claim_exactly(attempt, holder):
                return attempt

    def claim_exactly(self, attempt: int, holder: Holder) -> bool:
        """Begin this attempt; returns False if somebody else has."""
        record = Claim(attempt, uuid.uuid4().hex, holder)
        with suppress(AlreadyThere):
            self.storage.create(claim_key(attempt), to_json(record))
            return True
        return False

    def holder_of(self, attempt: int) -> Holder:
        """Return the holder of an attempt, without an execution if the claim is damaged."""
        claim = self.read(claim_key(attempt), Claim, extra="ignore")
        return claim.holder if claim else Holder()

    def check_claim(self, attempt: int) -> None:
        """Raise :class:`Superseded` if a later attempt has begun, or if the home was swept."""
        last = newest(self.storage.list(CLAIMS))
        if last > attempt:
            raise Superseded(
                f"{self.storage.base}: attempt {last} works here now ({self.holder_of(last)}); attempt {attempt} stops"
            )
        if last < attempt:
            raise Superseded(f"{self.storage.base}: the claim of attempt {attempt} is gone; it stops")

    # Which checkpoints count

    def checkpoints(self) -> list[Name]:
        """The complete checkpoints that count, newest first."""
        return self._counting(self.storage.list(CHECKPOINTS))

    def _counting(self, keys: Sequence[str]) -> list[Name]:
        last = newest(self.storage.list(INHERITED), INHERITED)
        record = self.read(inherited_key(last), Inherited, extra="ignore") if last else None
        inherited = record.checkpoints if record else ()
        return [name for name in complete(keys) if name.attempt >= last or str(name) in inherited]

    def inherit(self, attempt: int) -> list[Name]:
        """Record the checkpoints that count for ``attempt``, which has claimed the home, and delete what else earlier
        attempts have left. Returns them, newest first."""
        keys = self.storage.list(CHECKPOINTS)
        counting = self._counting(keys)
        names = {str(name) for name in counting}
        self.storage.create(inherited_key(attempt), to_json(Inherited(attempt, sorted(names))))
        with not_needed():
            self.storage.delete(left_behind(keys, names, attempt))
        return counting

    def is_inherited(self, attempt: int) -> bool:
        """Whether a later attempt has restored, or is about to."""
        return newest(self.storage.list(INHERITED), INHERITED) > attempt

    # The end

    def finish(self, holder: Holder, artifact: str, code: str) -> None:
        """Record where the trained model lies, and delete all that nobody needs any more. Nothing if another attempt
        has taken the home over."""
        if self.holder_of(newest(self.storage.list(CLAIMS))) != holder:
            return
        self.storage.put(FINISHED, to_json(Finished(holder, artifact, code)))
        with not_needed():
            self.sweep()

    def finished(self) -> Finished | None:
        return self.read(FINISHED, Finished, extra="ignore")

    def reopen(self) -> None:
        """Begin afresh in a home whose training is finished."""
        self.sweep()
        self.storage.delete([FINISHED])

    def sweep(self) -> None:
        """Delete all but the record of the end, the last claim and what was inherited last: numbers of attempts are
        never used twice, so that one that still runs stays superseded and what it writes never counts."""
        keys = self.storage.list()
        kept = {FINISHED, claim_key(newest(keys)), inherited_key(newest(keys, INHERITED))}
        checkpoints = [key for key in keys if key.startswith(CHECKPOINTS)]
        # Manifests first, so that a sweep that is interrupted leaves no checkpoint that looks complete.
        self.storage.delete([f"{name}/{MANIFEST}" for name in complete(checkpoints)])
        self.storage.delete([key for key in keys if key not in kept])


@contextmanager
def not_needed() -> Iterator[None]:
    """Deletes what no work depends on: if that fails, it is a warning."""
    try:
        yield
    except (UserError, StorageUnavailable) as error:
        LOG.warning("%s; what nobody needs any more takes up room until it is deleted", error)


def left_behind(keys: Iterable[str], names: set[str], attempt: int) -> list[str]:
    """The keys of checkpoints of attempts before ``attempt`` that are not among ``names``."""
    parsed = ((key, Name.parse(key.partition("/")[0])) for key in keys)
    return [key for key, name in parsed if name and name.attempt < attempt and str(name) not in names]
