"""Assignment of trials to workers, by claims and leases on checkpoint directories."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from filelock import FileLock

from slipstream.pipeline.sweep.store import SweepStore
from slipstream.pipeline.train.checkpoint.home import CLAIMS, CheckpointDirectory, newest_attempt
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, Lease, LeaseObserver, process_lock, within_timeout
from slipstream.shared.artifacts.homes import Holder
from slipstream.shared.storage import storage_for

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
    """One worker's record of running trials; ``holder`` is this worker."""

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
