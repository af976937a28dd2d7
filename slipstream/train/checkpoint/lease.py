"""The lease of a home: the sign of life of the attempt that works there, and how others wait for its end.

The holder rewrites ``leases/<attempt>.json`` every few seconds, more often while a save is announced or its end is
near. Others see that it lives from records that change, never from a clock: those of two machines may differ. In a
local directory the holder's process also has a lock on a file, which the system releases when the process ends, however
that happens.

A request may take minutes until it is given up. Those of heartbeats and claims end within half of the timeout that then
holds, so that another heartbeat follows in time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from slipstream.artifacts.format import canonical_json
from slipstream.artifacts.homes import Holder
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import Storage, StorageUnavailable, storage_for, within
from slipstream.storage.local import LocalStorage
from slipstream.storage.locks import lock_of
from slipstream.train.checkpoint.home import CLAIMS, Home, Name, Superseded, lease_key, newest

#: Seconds between two signs of life, and while a save is announced or the end is near.
PERIOD_S = 5.0
HASTE_S = 1.0
#: So many periods without a sign of life, and nobody is there any more.
SILENT_PERIODS = 9
#: The same in haste, where a successor waits.
SILENT_IN_HASTE = 4
#: Share of the timeout in which the requests of one heartbeat end.
SHARE_OF_TIMEOUT = 0.5
#: How soon it is seen that the end is near.
GLANCE_S = 0.2
#: How often others look for signs of life; a predecessor on this machine's disk is seen to have gone at once.
POLL_S = 1.0
POLL_IN_HASTE_S = 0.1

LOG = logger("checkpoint")

T = TypeVar("T")


@dataclass(frozen=True)
class Sign:
    """One sign of life."""

    #: Counts the signs of this attempt.
    beat: int = 0
    #: The step of its last checkpoint.
    step: int = 0
    #: The name of the checkpoint that it is about to write; "" if none.
    announced: str = ""
    #: Whether its machine has a notice: it ends within its grace period.
    leaving: bool = False
    #: Whether the training is finished, and its result on the way to where Flyte looks for it.
    delivering: bool = False
    #: Whether it has ended by itself, and writes nothing any more.
    ended: bool = False

    @property
    def silence_s(self) -> float:
        """Seconds without another sign after which there is none to come."""
        return SILENT_IN_HASTE * HASTE_S if self.announced or self.leaving else SILENT_PERIODS * PERIOD_S


def within_timeout(home: Home, timeout_s: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, a heartbeat or a claim in ``home`` while others wait for ``timeout_s``.

    Raises ``StorageUnavailable`` if its requests do not end in time. A local directory is not asked by requests.
    """
    return work() if home.is_local else within(SHARE_OF_TIMEOUT * timeout_s, work)


def sign_of(home: Home, attempt: int) -> Sign | None:
    """The last sign of life of an attempt; None if there is none."""
    return home.read(lease_key(attempt), Sign)


class Lease:
    """The lease that an attempt holds; of its ranks only rank 0 has one.

    ``leaving`` says whether this process has a notice; ``lost`` is called once, with the reason, if another attempt has
    taken the home over. Both are called from the lease's thread.
    """

    def __init__(
        self,
        home: Home,
        attempt: int,
        leaving: Callable[[], bool] = lambda: False,
        lost: Callable[[str], None] = lambda why: None,
        sign: Sign | None = None,
        lock: FileLock | None = None,
    ) -> None:
        """``sign`` is the last one that this attempt has given; ``lock`` that of the home, if it was acquired."""
        self._home, self.attempt = home, attempt
        self._leaving, self._lost = leaving, lost
        self._sign = sign or Sign()
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        #: The shortest timeout that others may apply: that of a sign whose answer was lost may hold, too.
        self._timeout_s = min(Sign().silence_s, self._sign.silence_s)
        #: Whether it was said that the end of this attempt is near, and whether that was before any later one began.
        self._said_leaving = self._sign.leaving
        self._may_take_leave = False
        self._process_lock = lock or process_lock(home.storage)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._write()
        self._thread.start()

    @classmethod
    def take(cls, home: Home, holder: Holder, leaving: Callable[[], bool], lost: Callable[[str], None]) -> Lease:
        """Claim a home and hold its lease."""
        # The lock first: nobody may see a claim without it, which is what one leaves whose process has gone.
        lock = process_lock(home.storage)
        try:
            attempt = within_timeout(home, Sign().silence_s, lambda: home.claim(holder))
            return cls(home, attempt, leaving, lost, lock=lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    @property
    def alone(self) -> bool:
        """Whether it is certain that no process lives that held the lease before."""
        return self._process_lock is not None

    def announce(self, name: Name) -> None:
        """Say that this checkpoint is about to be written.

        Raises ``StorageUnavailable`` if a store does not take it for half of the ordinary timeout, and
        :class:`Superseded` if a later attempt has begun, unless that knew at its beginning that the end of this one is
        near: then it waits for this save, and has not looked what there is.
        """
        last = time.monotonic() + SHARE_OF_TIMEOUT * Sign().silence_s
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

    def saved(self, name: Name) -> None:
        """The announced checkpoint is complete. Others see that from its manifest; the next sign says it, too."""
        self._change(step=name.step, announced="")

    def withdraw(self) -> None:
        """The announced checkpoint will not be written."""
        self._change(announced="")

    def end(self) -> None:
        """This attempt writes nothing any more. A store that stays away is not waited for."""
        self._stop(ended=True)

    def hand_over(self) -> None:
        """The training is finished; another process of this attempt keeps the lease until its result is delivered."""
        self._stop(delivering=True)

    def drop(self) -> None:
        """As :meth:`end`, without a word of it: the home is about to be swept."""
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

    def _change(self, **changes: Any) -> Sign:
        with self._changing:
            self._sign = replace(self._sign, **changes)
            return self._sign

    def _write(self, **changes: Any) -> None:
        with self._writing:
            sign = self._change(beat=self._sign.beat + 1, **changes)
            self._timeout_s = min(self._timeout_s, sign.silence_s)
            content = canonical_json(asdict(sign))
            put = partial(self._home.storage.put, lease_key(self.attempt), content)
            within_timeout(self._home, self._timeout_s, put)
            self._timeout_s = sign.silence_s

    def _beat(self) -> None:
        began = time.monotonic()
        while not self._over.wait(GLANCE_S):
            leaving = self._leaving() and not self._said_leaving
            period_s = HASTE_S if self._timeout_s < Sign().silence_s else PERIOD_S
            if not leaving and time.monotonic() < began + period_s:
                continue
            began = time.monotonic()
            with suppress(UserError, StorageUnavailable):
                if why := within_timeout(self._home, self._timeout_s, partial(self._lost_to, leaving)):
                    self._lost(why)
                    return

    def _lost_to(self, leaving: bool) -> str:
        """Give a sign of life; unless the home is lost, and nothing may be finished any more: then why it is."""
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
    """A lock that shows other processes on this machine that this one lives; None if there is none to be had."""
    try:
        return acquired_lock(storage)
    except Timeout:  # of an attempt that was superseded and still lives
        return None


def acquired_lock(storage: Storage) -> FileLock | None:
    """Acquire the lock of a local checkpoint directory; None in a store, and on a disk without locks.

    Raises ``Timeout`` if another process holds it.
    """
    if not isinstance(storage, LocalStorage):
        return None
    lock = lock_of(storage.scratch() / "holder.lock", thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise
    except OSError:
        return None
    return lock


def is_unlocked(storage: Storage) -> bool:
    """Whether no process of this machine has the lock of a local home."""
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


class Watch:
    """What a process sees of the newest attempt in a home while it waits for it."""

    def __init__(self, home: Home, now: Callable[[], float] = time.monotonic) -> None:
        self._home, self._now = home, now
        self._seen: tuple[int, Sign | None] | None = None
        self._since = now()
        #: Whether a sign has followed another.
        self.alive = False

    def look(self, before: int = 0) -> tuple[int, Sign] | None:
        """The newest attempt (before the attempt ``before``, if that is given) and its last sign of life; None if there
        is none, or it has ended, or it has been silent for so long that nobody is there."""
        return within_timeout(self._home, Sign().silence_s, lambda: self._look(before))

    def _look(self, before: int) -> tuple[int, Sign] | None:
        # An answer may be as old as its question.
        asked = self._now()
        keys = self._home.storage.list(CLAIMS)
        attempt = newest(key for key in keys if not before or newest([key]) < before)
        if not attempt:
            return None
        sign = sign_of(self._home, attempt)
        # Between two processes of one attempt nobody has the lock.
        if not before and not (sign and sign.delivering) and is_unlocked(self._home.storage):
            return None
        if self._seen != (attempt, sign):
            self.alive = self._seen is not None and self._seen[0] == attempt and sign is not None
            self._seen, self._since = (attempt, sign), self._now()
        sign = sign or Sign()
        if sign.ended or asked - self._since >= sign.silence_s:
            return None
        return attempt, sign


def wait_for_others(address: str, holder: Holder, when_held: str) -> bool:
    """Wait until no other execution works in the home at ``address``; returns whether there was one.

    What comes before ``holder`` in the same execution is not waited for: its end is certain, and it is fenced off when
    ``holder`` claims the home. Raises ``UserError`` if ``when_held`` is "refuse" and the other one is alive.
    """
    home = Home(storage_for(address))
    watch, waited = Watch(home), False
    while (seen := watch.look()) and not home.finished():
        attempt, sign = seen
        other = home.holder_of(attempt)
        if holder.succeeds(other):
            break
        if when_held == "refuse" and watch.alive:
            raise UserError(
                f"{address}: {other} is at work on this training (saved step {sign.step}); wait for it, end it, or set "
                "training.when_held to wait"
            )
        if not waited:
            LOG.warning(
                "%s: held by %s (saved step %d): waits until it has ended, or shows no sign of life for %.0f s",
                address,
                other,
                sign.step,
                Sign().silence_s,
            )
        waited = True
        time.sleep(POLL_S)
    return waited


def wait_for_announced(home: Home, attempt: int, seconds: float) -> None:
    """Wait until the attempt before ``attempt``, which has claimed the home, has finished the save that it announced or
    is about to, as its machine has a notice: at most ``seconds``, and no longer than it shows signs of life."""
    watch, deadline, told = Watch(home), time.monotonic() + seconds, False
    while (seen := watch.look(before=attempt)) and time.monotonic() < deadline:
        before, sign = seen
        pending = sign.announced and Name.parse(sign.announced) not in home.checkpoints()
        if not pending and not sign.leaving:
            return
        if not told:
            LOG.info("waits for the last save of %s, %.0f s at most", home.holder_of(before), seconds)
        told = True
        time.sleep(POLL_IN_HASTE_S if home.is_local else POLL_S)
