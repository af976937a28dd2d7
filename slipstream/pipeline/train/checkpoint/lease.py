"""Heartbeat-based lease on a checkpoint directory, and the wait for its end.

The holder rewrites ``leases/<attempt>.json`` every few seconds, more often while it has announced a save or its
shutdown. Other processes see changing records, and never compare clocks of machines. In a local directory it also locks
a file, which the system unlocks however the process ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from slipstream.pipeline.train.checkpoint.home import (
    CLAIMS,
    CheckpointDirectory,
    CheckpointName,
    Superseded,
    lease_key,
    newest_attempt,
)
from slipstream.shared.artifacts.records import to_json
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import Storage, StorageUnavailable, call_within, storage_for
from slipstream.shared.storage.local import LocalStorage, file_lock

#: Seconds between heartbeats.
PERIOD_S = 5.0
#: Seconds between fast heartbeats, written while a save or the shutdown is announced.
HASTE_S = 1.0
#: Periods of :data:`PERIOD_S` without a heartbeat after which a lease expires.
SILENT_PERIODS = 9
#: Periods of :data:`HASTE_S` after which a lease with fast heartbeats expires; few, because a successor waits.
SILENT_IN_HASTE = 4
#: Fraction of the current timeout after which the requests of a heartbeat or claim are cut off, so that another
#: heartbeat follows in time. A store may retry a request for minutes.
SHARE_OF_TIMEOUT = 0.5
#: Seconds between checks for a preemption notice.
GLANCE_S = 0.2
#: Seconds between checks for another process's heartbeats in a store.
POLL_S = 1.0
#: Seconds between these checks on a local disk, where the lock shows the end of a process at once.
POLL_IN_HASTE_S = 0.1

LOG = logger("checkpoint")

T = TypeVar("T")


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of an attempt, as written to ``leases/<attempt>.json``."""

    #: Number of heartbeats that the attempt has written.
    beat: int = 0
    #: Step of the attempt's last checkpoint.
    step: int = 0
    #: Name of the checkpoint that the attempt is about to write; "" if none.
    announced: str = ""
    #: True if the attempt's machine has a preemption notice: the attempt ends within its grace period.
    leaving: bool = False
    #: True if the training is finished, and its result is being uploaded to Flyte's output location.
    delivering: bool = False
    #: True for an exit record: the attempt writes nothing any more.
    ended: bool = False

    @property
    def silence_s(self) -> float:
        """Timeout: seconds without a further heartbeat after which the lease expires."""
        return SILENT_IN_HASTE * HASTE_S if self.announced or self.leaving else SILENT_PERIODS * PERIOD_S


def within_timeout(home: CheckpointDirectory, timeout_s: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which writes a heartbeat or a claim in ``home``.

    Requests of ``work`` to a store are cut off after half of the lease's timeout ``timeout_s``; then
    ``StorageUnavailable`` is raised.
    """
    return work() if home.is_local else call_within(SHARE_OF_TIMEOUT * timeout_s, work)


def last_heartbeat(home: CheckpointDirectory, attempt: int) -> Heartbeat | None:
    """Return the last heartbeat of an attempt; None if it has not written any."""
    return home.read(lease_key(attempt), Heartbeat)


class Lease:
    """Lease of an attempt, held by rank 0 only.

    ``leaving`` returns True if this process has a preemption notice. ``lost`` is called once, with the reason, if
    another attempt has taken over the directory. The lease's thread calls both functions.
    """

    def __init__(
        self,
        home: CheckpointDirectory,
        attempt: int,
        leaving: Callable[[], bool] = lambda: False,
        lost: Callable[[str], None] = lambda why: None,
        sign: Heartbeat | None = None,
        lock: FileLock | None = None,
    ) -> None:
        """Start the heartbeats.

        ``sign`` is this attempt's last heartbeat, if another process wrote it. ``lock`` is the directory's lock, if
        already acquired.
        """
        self._home, self.attempt = home, attempt
        self._leaving, self._lost = leaving, lost
        self._sign = sign or Heartbeat()
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        #: Shortest timeout that others may apply: that of any heartbeat that may have arrived.
        self._timeout_s = min(Heartbeat().silence_s, self._sign.silence_s)
        #: True once the shutdown was announced.
        self._said_leaving = self._sign.leaving
        #: True if the shutdown was announced before any later attempt started: a last save is allowed.
        self._may_take_leave = False
        self._process_lock = lock or process_lock(home.storage)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._write()
        self._thread.start()

    @classmethod
    def take(
        cls, home: CheckpointDirectory, holder: Holder, leaving: Callable[[], bool], lost: Callable[[str], None]
    ) -> Lease:
        """Claim a checkpoint directory and hold its lease."""
        # Lock first: a claim without a lock looks like that of a dead process.
        lock = process_lock(home.storage)
        try:
            attempt = within_timeout(home, Heartbeat().silence_s, lambda: home.claim(holder))
            return cls(home, attempt, leaving, lost, lock=lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    @property
    def alone(self) -> bool:
        """True if no process that held the lease before can still be alive."""
        return self._process_lock is not None

    def announce(self, name: CheckpointName) -> None:
        """Announce that the checkpoint ``name`` is about to be written.

        Raises ``StorageUnavailable`` if a store accepts no announcement for half of the ordinary timeout. Raises
        :class:`Superseded` if a later attempt has started, unless this one had announced its shutdown: the later one
        then waits for this save.
        """
        last = time.monotonic() + SHARE_OF_TIMEOUT * Heartbeat().silence_s
        while True:
            try:
                self._write(announced=str(name))
                return within_timeout(self._home, self._timeout_s, self._check_announced)
            except StorageUnavailable:
                if self._home.is_local or time.monotonic() >= last:
                    raise
            time.sleep(GLANCE_S)

    def _check_announced(self) -> None:
        try:
            self._home.check_claim(self.attempt)
        except Superseded:
            if not self._may_take_leave or self._home.is_inherited(self.attempt):
                raise

    def saved(self, name: CheckpointName) -> None:
        """Record that the announced checkpoint is complete.

        Others see it from the manifest, and from the next heartbeat.
        """
        self._change(step=name.step, announced="")

    def withdraw(self) -> None:
        """Withdraw the announcement: the checkpoint will not be written."""
        self._change(announced="")

    def end(self) -> None:
        """Shut down and write an exit record, without waiting for an unavailable store."""
        self._stop(ended=True)

    def hand_over(self) -> None:
        """Stop the heartbeats of a finished training.

        Another process of this attempt continues the lease until the result is delivered.
        """
        self._stop(delivering=True)

    def drop(self) -> None:
        """Shut down without an exit record, because the directory is about to be deleted."""
        self._stop()

    def _stop(self, **last_word: bool) -> None:
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(HASTE_S)
        if last_word:
            last = threading.Thread(target=self._last_sign, kwargs=last_word, name="lease", daemon=True)
            last.start()
            last.join(SILENT_IN_HASTE * HASTE_S)
        if self._process_lock is not None:
            self._process_lock.release()

    def _last_sign(self, **last_word: bool) -> None:
        with suppress(UserError, StorageUnavailable):
            self._write(announced="", **last_word)

    def _change(self, **changes: Any) -> Heartbeat:
        with self._changing:
            self._sign = replace(self._sign, **changes)
            return self._sign

    def _write(self, **changes: Any) -> None:
        with self._writing:
            sign = self._change(beat=self._sign.beat + 1, **changes)
            self._timeout_s = min(self._timeout_s, sign.silence_s)
            content = to_json(sign)
            put = partial(self._home.storage.put, lease_key(self.attempt), content)
            within_timeout(self._home, self._timeout_s, put)
            self._timeout_s = sign.silence_s

    def _beat(self) -> None:
        began = time.monotonic()
        while not self._over.wait(GLANCE_S):
            leaving = self._leaving() and not self._said_leaving
            period_s = HASTE_S if self._timeout_s < Heartbeat().silence_s else PERIOD_S
            if not leaving and time.monotonic() < began + period_s:
                continue
            began = time.monotonic()
            with suppress(UserError, StorageUnavailable):
                if why := within_timeout(self._home, self._timeout_s, partial(self._lost_to, leaving)):
                    self._lost(why)
                    return

    def _lost_to(self, leaving: bool) -> str:
        """Write a heartbeat and return "", or return why the directory is lost.

        It is lost if a later attempt has started and no last save of this attempt is allowed. ``leaving`` announces the
        shutdown.
        """
        try:
            self._home.check_claim(self.attempt)
        except Superseded as error:
            last = self._sign.announced or self._may_take_leave
            if not last or self._home.is_inherited(self.attempt):
                return str(error)
        self._write(leaving=self._sign.leaving or leaving)
        if leaving:
            self._said_leaving = True
            with suppress(Superseded):
                self._home.check_claim(self.attempt)
                self._may_take_leave = True
        return ""


def process_lock(storage: Storage) -> FileLock | None:
    """Return the acquired lock of a local checkpoint directory, which shows that this process lives.

    None if the directory cannot be locked, or if another process holds the lock.
    """
    try:
        return acquired_lock(storage)
    except Timeout:  # of a superseded attempt that still lives
        return None


def acquired_lock(storage: Storage) -> FileLock | None:
    """Acquire and return the lock of a local checkpoint directory.

    None in a store, and on a disk without locks. Raises ``Timeout`` if another process holds the lock.
    """
    if not isinstance(storage, LocalStorage):
        return None
    lock = file_lock(storage.scratch() / "holder.lock", thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise
    except OSError:
        return None
    return lock


def is_unlocked(storage: Storage) -> bool:
    """Return True if the directory is local and no process of this machine holds its lock."""
    lock = process_lock(storage)
    if lock is None:
        return False
    lock.release()
    return True


def is_locked(storage: Storage) -> bool:
    """Return True if a process holds the lock of a local checkpoint directory."""
    try:
        lock = acquired_lock(storage)
    except Timeout:
        return True
    if lock is not None:
        lock.release()
    return False


class LeaseObserver:
    """Observer of the newest attempt in a checkpoint directory, for a process that waits."""

    def __init__(self, home: CheckpointDirectory, now: Callable[[], float] = time.monotonic) -> None:
        self._home, self._now = home, now
        self._seen: tuple[int, Heartbeat | None] | None = None
        self._since = now()
        #: True once a heartbeat has followed another.
        self.alive = False

    def look(self, before: int = 0) -> tuple[int, Heartbeat] | None:
        """Return the newest attempt and its last heartbeat; None if that attempt is not alive.

        ``before`` limits the search to attempts before it (0: all). An attempt is not alive after its exit record, or
        once its lease has expired.
        """
        return within_timeout(self._home, Heartbeat().silence_s, lambda: self._look(before))

    def _look(self, before: int) -> tuple[int, Heartbeat] | None:
        # The store may have answered at any time since the request.
        asked = self._now()
        keys = self._home.storage.list(CLAIMS)
        attempt = newest_attempt(key for key in keys if not before or newest_attempt([key]) < before)
        if not attempt:
            return None
        sign = last_heartbeat(self._home, attempt)
        # Between two processes of one attempt the lock is free.
        if not before and not (sign and sign.delivering) and is_unlocked(self._home.storage):
            return None
        if self._seen != (attempt, sign):
            self.alive = self._seen is not None and self._seen[0] == attempt and sign is not None
            self._seen, self._since = (attempt, sign), self._now()
        sign = sign or Heartbeat()
        if sign.ended or asked - self._since >= sign.silence_s:
            return None
        return attempt, sign


def wait_for_others(address: str, holder: Holder, when_held: str) -> bool:
    """Wait until no other execution works in the directory at ``address``; return True if it had to wait.

    Earlier attempts of the same execution are not waited for: Flyte has ended them, and the claim of ``holder`` stops
    their writes. Raises ``UserError`` if ``when_held`` is "refuse" and the other execution is alive.
    """
    home = CheckpointDirectory(storage_for(address))
    watch, waited = LeaseObserver(home), False
    while (seen := watch.look()) and not home.finished():
        attempt, sign = seen
        other = home.holder_of(attempt)
        if holder.succeeds(other):
            break
        if when_held == "refuse" and watch.alive:
            raise UserError(
                f"{address}: {other} is running this training (saved step {sign.step}); wait for it, end it, or set "
                "training.when_held to wait"
            )
        if not waited:
            LOG.warning(
                "%s is held by %s (saved step %d); this execution waits until that one has ended, or has sent no "
                "heartbeat for %.0f s",
                address,
                other,
                sign.step,
                Heartbeat().silence_s,
            )
        waited = True
        time.sleep(POLL_S)
    return waited


def wait_for_announced(home: CheckpointDirectory, attempt: int, seconds: float) -> None:
    """Wait until the predecessor of ``attempt`` has finished its last save.

    ``attempt`` has claimed the directory. The save was announced, or may follow a preemption notice. Waits at most
    ``seconds``, while heartbeats continue.
    """
    watch, deadline, told = LeaseObserver(home), time.monotonic() + seconds, False
    while (seen := watch.look(before=attempt)) and time.monotonic() < deadline:
        before, sign = seen
        pending = sign.announced and CheckpointName.parse(sign.announced) not in home.checkpoints()
        if not pending and not sign.leaving:
            return
        if not told:
            LOG.info("training waits for the last checkpoint of %s, at most %.0f s", home.holder_of(before), seconds)
        told = True
        time.sleep(POLL_IN_HASTE_S if home.is_local else POLL_S)
