"""Who works on which trial: claims and leases, as those of a training's checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from filelock import FileLock

from slipstream.artifacts.homes import Holder
from slipstream.storage import storage_for
from slipstream.sweep.store import SweepStore
from slipstream.train.checkpoint.home import CLAIMS, Home, newest
from slipstream.train.checkpoint.lease import Lease, Sign, Watch, process_lock, within_timeout

#: How often a lock is asked for that another process may have for a moment, to see whether anybody has it.
LOCK_ATTEMPTS, LOCK_PAUSE_S = 10, 0.02
#: Seconds after which a trial that was at work is looked at again. Several fit into the time after which no sign of
#: life is to be expected.
GLANCE_S = 10.0


@dataclass(frozen=True)
class Seen:
    """What was seen of a trial, and when (``time.monotonic``): the last attempt at it, and whether that is going on;
    None while nobody can say, as a sign of life may or may not follow."""

    attempt: int
    held: bool | None
    at: float


@dataclass
class Occupation:
    """The trials of a store as one worker sees who is at work on them."""

    store: SweepStore
    holder: Holder
    #: By trial.
    watches: dict[int, Watch] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)

    def look(self, trial: int) -> Seen:
        """Whether another worker is at work on a trial. In a store that is asked again only after some time: there may
        be hundreds at work."""
        before, now = self.seen.get(trial), time.monotonic()
        if before and before.held is not False and now - before.at < GLANCE_S:
            return before
        home = Home(storage_for(self.store.home(trial)))
        self.seen[trial] = within_timeout(home, Sign().silence_s, lambda: self._look(trial, home, now))
        return self.seen[trial]

    def _look(self, trial: int, home: Home, now: float) -> Seen:
        attempt = newest(home.storage.list(CLAIMS))
        watch = self.watches.setdefault(trial, Watch(home))
        seen = watch.look()
        if seen is None or self.holder.succeeds(home.holder_of(seen[0])):
            return Seen(attempt, held=False, at=now)
        if home.is_local:  # where it costs nothing to look
            return Seen(attempt, held=True, at=now - GLANCE_S)
        return Seen(attempt, held=True if watch.alive else None, at=now)

    def take(self, trial: int, after: int, leaving: Callable[[], bool], lost: Callable[[str], None]) -> Lease | None:
        """Begin the attempt at a trial that follows the attempt ``after``; None if another worker was first.
        ``leaving`` and ``lost`` are those of :class:`Lease`."""
        home = Home(storage_for(self.store.home(trial)))
        lock = lock_of(home)
        taken = False
        try:
            taken = within_timeout(home, Sign().silence_s, lambda: home.claim_exactly(after + 1, self.holder))
            return Lease(home, after + 1, leaving, lost, lock=lock) if taken else None
        finally:
            if lock is not None and not taken:
                lock.release()


def lock_of(home: Home) -> FileLock | None:
    for _ in range(LOCK_ATTEMPTS if home.is_local else 1):
        if lock := process_lock(home.storage):
            return lock
        time.sleep(LOCK_PAUSE_S)
    return None
