"""The save in progress: its snapshot is completed beside the steps, then published by a thread that gives way to
them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tasks.errors import UserError
from tasks.logs import logger
from tasks.storage import StorageUnavailable
from tasks.train.checkpoint.layout import Name
from tasks.train.checkpoint.priority import give_way, given_way_s, needed
from tasks.train.checkpoint.publish import Publisher, Snapshot
from tasks.train.device_clock import DeviceClock, Mark

#: Saves in a row that may fail before training stops, since a full disk or an unavailable store may recover.
TOLERATED_FAILURES = 2

LOG = logger("checkpoint")


@dataclass(frozen=True)
class StepWait:
    """The host waited from ``started`` to ``ended`` (on the clock of ``time.perf_counter``) before it gave the
    optimiser's step to the device, which ``reached`` that place."""

    reached: Mark
    started: float
    ended: float

    def stall(self) -> float:
        """Seconds that the device stood still; waits until it has come there."""
        return max(0.0, self.ended - max(self.started, self.reached.wait()))


class BackgroundSave:
    """One save at a time. All ranks call :meth:`begin` and :meth:`wait` at the same points."""

    def __init__(self, publisher: Publisher, clock: DeviceClock) -> None:
        self._publisher = publisher
        self._clock = clock
        # Completes the snapshots; publishing takes threads of its own, as a thread's priority can only be lowered.
        self._copier = ThreadPoolExecutor(1, "checkpoint-copy")
        self._copied = threading.Event()
        self._copied.set()
        self._pending: Future[Name] | None = None
        self._step_wait: StepWait | None = None
        self._failures = 0
        #: Seconds from snapshot to publication that the last successful save needs when no steps run beside it; equal
        #: on all ranks.
        self.publish_seconds = 0.0
        #: The last checkpoint that was published.
        self.published: Name | None = None

    def prepare(self) -> None:
        """Make the copying thread: on busy processors the caller of ``Thread.start`` may wait for milliseconds."""
        self._copier.submit(int).result()

    def begin(self, complete: Callable[[], Snapshot]) -> None:
        """Have ``complete`` called, and its result published."""
        self._copied.clear()
        self._pending = Future()
        self._copier.submit(self._copy, complete, self._pending)

    def _copy(self, complete: Callable[[], Snapshot], outcome: Future[Name]) -> None:
        started = time.perf_counter()
        try:
            try:
                snapshot = complete()
            finally:
                self._copied.set()
            publishing = (snapshot, started, outcome)
            threading.Thread(target=self._publish, args=publishing, name="checkpoint", daemon=True).start()
        except BaseException as error:
            outcome.set_exception(error)

    def _publish(self, snapshot: Snapshot, started: float, outcome: Future[Name]) -> None:
        try:
            give_way()
            waited = given_way_s()
            name = self._publisher.publish(snapshot)
            took = time.perf_counter() - started, given_way_s() - waited
            self.publish_seconds = needed(self._publisher.peers.gather(took))
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(name)

    def busy(self) -> bool:
        """Whether a save is in progress on this rank. Ranks may differ for a moment."""
        return self._pending is not None and not self._pending.done()

    def wait(self, *, tolerated: int = TOLERATED_FAILURES) -> None:
        """Wait for the save in progress. Raises its error if more than ``tolerated`` saves in a row have failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self.published = pending.result()
            self._failures = 0
        except (UserError, StorageUnavailable) as error:
            self._failures += 1
            if self._failures > tolerated:
                raise
            if self._publisher.peers.rank == 0:
                LOG.warning("not saved: %s; going on, the next one tries again", error)

    def wait_for_copy(self) -> None:
        """Wait until the snapshot in progress holds copies of all tensors."""
        self._copied.wait()

    def delay_step(self) -> None:
        """Delay the optimiser's step until the snapshot has copied what the step changes."""
        if not self._copied.is_set():
            reached, started = self._clock.mark(), time.perf_counter()
            self.wait_for_copy()
            self._step_wait = StepWait(reached, started, time.perf_counter())

    def pop_step_wait(self) -> StepWait | None:
        """The wait of the optimiser's last step for a snapshot, if it had to wait and this was not asked before."""
        wait, self._step_wait = self._step_wait, None
        return wait

    def close(self) -> None:
        """End the copying thread, without waiting for a save."""
        self._copier.shutdown(wait=False)
