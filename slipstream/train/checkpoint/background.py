"""The save in progress: its snapshot is completed beside the steps, then published by a thread that gives way to
them.

The steps go on while a store stays away. One snapshot at most waits until the save in progress has ended, and a newer
one takes its place, since there is one set of buffers. A save that the store did not take waits, too, and is tried
again. All ranks call :meth:`BackgroundSave.begin`, :meth:`~BackgroundSave.resume` and :meth:`~BackgroundSave.finish` at
the same points, knowing whether a save is in progress on any of them, so that all publish the same snapshots in the
same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import StorageUnavailable
from slipstream.storage.retry import failed_since
from slipstream.train.checkpoint.outage import Outage
from slipstream.train.checkpoint.priority import give_way, given_way_s, needed
from slipstream.train.checkpoint.publish import Publisher, Snapshot
from slipstream.train.device_clock import DeviceClock, Mark
from slipstream.train.homes.layout import Name

#: Saves in a row that may be refused (a full disk, a right that is missing) before training stops.
TOLERATED_FAILURES = 2
#: Seconds at a time for which the steps wait for a save that is still in progress when the next is due.
GLANCE_S = 0.05

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


@dataclass
class Save:
    """One save, from its snapshot on."""

    step: int
    #: When the snapshot was taken, on the clock of :class:`~slipstream.train.checkpoint.outage.Outage`.
    taken: float
    begun: float = field(default_factory=time.monotonic)
    #: None until it is copied.
    snapshot: Snapshot | None = None
    #: Set once the buffers may be used for the next snapshot.
    staged: threading.Event = field(default_factory=threading.Event)
    outcome: Future[Name] = field(default_factory=Future)

    @property
    def over(self) -> bool:
        return self.outcome.done()

    def again(self) -> Save:
        return Save(self.step, self.taken, snapshot=self.snapshot)


class BackgroundSave:
    """One save at a time, and one snapshot that waits."""

    def __init__(self, publisher: Publisher, clock: DeviceClock) -> None:
        self._publisher = publisher
        self._clock = clock
        # Completes the snapshots; publishing takes threads of its own, as a thread's priority can only be lowered.
        self._copier = ThreadPoolExecutor(1, "checkpoint-copy")
        self._copied = threading.Event()
        self._copied.set()
        self._active: Save | None = None
        self._waiting: Save | None = None
        self._step_wait: StepWait | None = None
        self._was_late = False
        self._refused = 0
        self.outage = Outage(publisher.storage.base)
        #: Seconds from snapshot to publication that the last successful save needs when no steps run beside it; equal
        #: on all ranks.
        self.publish_seconds = 0.0
        #: The last checkpoint that was published.
        self.published: Name | None = None

    def prepare(self) -> None:
        """Make the copying thread: on busy processors the caller of ``Thread.start`` may wait for milliseconds."""
        self._copier.submit(int).result()

    def busy(self) -> bool:
        """Whether a save is in progress on this rank. Ranks may differ for a moment."""
        return self._active is not None and not self._active.over

    def failing(self) -> bool:
        """Whether the save in progress is not worth waiting for: the store does not answer this rank, or the save was
        late before."""
        return self._active is not None and (self._was_late or failed_since(self._active.begun))

    def glance(self) -> None:
        """Wait for the save in progress, a moment at most."""
        if self._active is not None:
            wait([self._active.outcome], timeout=GLANCE_S)

    def wait_for_buffers(self) -> None:
        """Wait until the buffers hold nothing that is still to be written; a snapshot that waits may be overwritten."""
        self.wait_for_copy()
        if self._active is not None and not self._active.over:
            self._active.staged.wait()

    def begin(self, step: int, complete: Callable[[], Snapshot], *, late: bool) -> None:
        """Have ``complete`` called, and its result published: at once, or if the save before was ``late`` on any rank,
        after it. Raises as :meth:`resume` does."""
        save = Save(step, self.outage.now())
        self._was_late = late
        if not late:
            self._settle()
        self.outage.tries(save.taken)
        if late:
            self._waiting = save
        else:
            self._waiting, self._active = None, save
        self._copied.clear()
        self._copier.submit(self._copy, complete, save, publish=not late)

    def _copy(self, complete: Callable[[], Snapshot], save: Save, publish: bool) -> None:
        try:
            try:
                save.snapshot = complete()
            finally:
                self._copied.set()
            if publish:
                self._start(save)
        except BaseException as error:
            save.staged.set()
            save.outcome.set_exception(error)

    def _start(self, save: Save) -> None:
        if not save.over:  # its copy failed
            threading.Thread(target=self._publish, args=(save,), name="checkpoint", daemon=True).start()

    def _publish(self, save: Save) -> None:
        started = time.perf_counter()
        try:
            assert save.snapshot is not None
            give_way()
            waited = given_way_s()
            name = self._publisher.publish(save.snapshot, save.staged.set)
            took = time.perf_counter() - started, given_way_s() - waited
            self.publish_seconds = needed(self._publisher.peers.gather(took))
        except BaseException as error:
            save.staged.set()
            save.outcome.set_exception(error)
        else:
            save.outcome.set_result(name)

    def resume(self, step: int, *, busy: bool) -> None:
        """Between two steps, ``step`` being the last: publish the snapshot that waits, unless a save is in progress on
        any rank (``busy``).

        Raises ``UserError`` if more than :data:`TOLERATED_FAILURES` saves in a row were refused, and ``Superseded``. A
        store that stays away is a warning, now and then.
        """
        if not busy:
            self._settle()
            self._publish_waiting()
        self._warn(step)

    def _publish_waiting(self) -> None:
        """Publish the snapshot that waits, if there is one; no save is in progress."""
        if self._waiting is not None:
            self._active, self._waiting = self._waiting, None
            self.outage.tries(self._active.taken)
            # After its copy: the copier works in order.
            self._copier.submit(self._start, self._active)

    def _warn(self, step: int) -> None:
        """Say what a loss would cost, if nothing can be saved and it is time to."""
        warning = self.outage.warning(step) if self.waiting else ""
        if warning and self._publisher.peers.rank == 0:
            LOG.warning("%s", warning)

    def _settle(self, *, tolerate: bool = True) -> None:
        """Take in the outcome of the last save, which is over on all ranks. Raises its error, or tolerates it."""
        save, self._active = self._active, None
        if save is None:
            return
        try:
            self.published = save.outcome.result()
        except StorageUnavailable as error:
            self.outage.failed(str(error))
            self._waiting = self._waiting or save.again()
            if not tolerate:
                raise
        except UserError as error:
            self._refused += 1
            if self._refused > TOLERATED_FAILURES or not tolerate:
                raise
            if self._publisher.peers.rank == 0:
                LOG.warning("not saved: %s; going on, the next one tries again", error)
        else:
            self._refused = 0
            if (again := self.outage.saved(save.step, save.taken)) and self._publisher.peers.rank == 0:
                LOG.info("%s", again)

    @property
    def waiting(self) -> bool:
        """Whether there is a snapshot that is not published; the same on all ranks."""
        return self._waiting is not None or self._active is not None

    def finish(self, *, tolerate: bool = False) -> None:
        """Publish all there is. Raises the error of a save that failed, unless it is to be tolerated."""
        while self.waiting:
            if self._active is None:
                self._publish_waiting()
            assert self._active is not None
            wait([self._active.outcome])
            failed = self._active.outcome.exception() is not None
            newer = self._waiting is not None
            self._settle(tolerate=tolerate or newer)
            if failed and not newer:
                return

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
        wait_before, self._step_wait = self._step_wait, None
        return wait_before

    def close(self) -> None:
        """End the copying thread, without waiting for a save."""
        self._copier.shutdown(wait=False)
