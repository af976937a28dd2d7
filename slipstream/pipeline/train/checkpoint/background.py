"""Background publication of checkpoints.

A background thread completes the snapshot while training steps run. A low-priority thread then publishes it. Training
continues while the store is unavailable, and now and then logs what a failure would cost. At most one snapshot waits
for the save in progress; a newer snapshot replaces it, since there is one set of buffers. A save that failed because of
the store also waits and is retried.

All ranks call :meth:`BackgroundSave.begin`, :meth:`~BackgroundSave.resume` and :meth:`~BackgroundSave.finish` at the
same points, after agreeing whether any rank's save is in progress. So all publish the same snapshots in order.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.pipeline.train.checkpoint.home import CheckpointName
from slipstream.pipeline.train.checkpoint.publish import CheckpointSnapshot, Publisher
from slipstream.pipeline.train.checkpoint.save_states import TRANSITIONS, SaveAction, SaveEvent, SaveState
from slipstream.pipeline.train.device_clock import DeviceClock, DeviceMark, same_gpu
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import StorageUnavailable
from slipstream.shared.storage.retry import failed_since

#: Niceness of the publishing thread. With steps on every core, a save of 300 MB took 14 s at niceness 19; at niceness
#: 12 the steps took 1.15 times as long.
NICENESS = 16
SCHEDULING = Path("/proc/thread-self/schedstat")
#: Seconds without a completed save after which a warning is logged, even if no request has failed.
SLOW_S = 60.0
#: Consecutive saves that may be refused (full disk, missing permission) before training stops.
TOLERATED_FAILURES = 2
#: Longest single wait, in seconds, of :meth:`BackgroundSave.wait_briefly`.
BRIEF_WAIT_S = 0.05

LOG = logger("checkpoint")


def lower_thread_priority() -> None:
    """Lower the priority of this thread permanently: raising it again needs privileges.

    On an idle core the thread is as fast as before.
    """
    # On other systems a priority applies to a whole process.
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def waited_for_processor_s() -> float:
    """Return the seconds for which this thread was runnable without a core; 0 if the system does not report them."""
    try:
        return int(SCHEDULING.read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def working_seconds(took: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a save without the time in which its thread waited for a core.

    ``took`` holds (total, waited) seconds of every rank. The longest wait is subtracted from the longest total, because
    ranks wait for each other.
    """
    return max(0.0, max(seconds for seconds, _ in took) - max(waited for _, waited in took))


@dataclass
class Outage:
    """Time since the last save to the checkpoint directory ``home``; ``now`` is a clock in seconds."""

    home: str
    now: Callable[[], float] = time.monotonic
    #: Step of the last checkpoint.
    step: int = 0
    #: Time of the last checkpoint's snapshot; before the first, the start of training.
    since: float = field(init=False)
    #: Time of the first snapshot that is not saved yet; None without one.
    first_unsaved: float | None = None
    #: Reason why the last save failed; "" if it did not.
    why: str = ""
    #: Seconds without a save after which the next warning is due.
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.now()

    @property
    def seconds(self) -> float:
        """Seconds of work that a failure now would lose."""
        return self.now() - self.since

    @property
    def unsaved_s(self) -> float:
        """Seconds since the oldest unsaved snapshot; 0 if all are saved."""
        return 0.0 if self.first_unsaved is None else self.now() - self.first_unsaved

    def add_unsaved(self, taken: float) -> None:
        """Record that a snapshot of time ``taken`` is to be saved."""
        self.first_unsaved = taken if self.first_unsaved is None else self.first_unsaved

    def begin(self, step: int) -> None:
        """Start measuring at ``step``, as if it had just been saved."""
        self.step, self.since = step, self.now()

    def saved(self, step: int, taken: float) -> str:
        """Record the checkpoint of ``step``, whose snapshot was taken at time ``taken``.

        Returns a log line that ends the outage if a warning was logged before, else an empty string.
        """
        self.step, self.since, self.why, self.first_unsaved = step, taken, "", None
        warned, self._next_s = self._next_s > 0, 0.0
        return f"checkpoint at step {step} saved at {self.home}: the store accepts checkpoints again" if warned else ""

    def warning(self, step: int) -> str:
        """Return a warning if no save succeeds, repeated whenever the possible loss has doubled.

        Returns an empty string if no warning is due.
        """
        lost_s = self.seconds
        if lost_s < (self._next_s or (0.0 if self.why else SLOW_S)):
            return ""
        self._next_s = max(2 * lost_s, 1.0)
        why = f" ({self.why})" if self.why else ""
        return (
            f"no checkpoint could be saved at {self.home} for {lost_s:.0f} s{why}: a failure now would cost "
            f"{step - self.step} steps; training continues and retries"
        )


@dataclass(frozen=True)
class StepWait:
    """Wait of the host process for a snapshot before it enqueued an optimiser step.

    ``started`` and ``ended`` are times of ``time.perf_counter``. ``reached`` is a mark in the device's queue at
    ``started``.
    """

    reached: DeviceMark
    started: float
    ended: float
    #: True if the snapshot was that of a save.
    of_save: bool = True

    def stall(self) -> float:
        """Wait until the device has reached the mark, and return the seconds for which it was idle."""
        return max(0.0, self.ended - max(self.started, self.reached.wait()))


@dataclass
class CheckpointSave:
    """State of one save, from its snapshot to its outcome."""

    step: int
    #: Time of the snapshot, on the clock of :class:`Outage`.
    taken: float
    started: float = field(default_factory=time.monotonic)
    #: None until all tensors are copied.
    snapshot: CheckpointSnapshot | None = None
    #: Set once the buffers may be used for the next snapshot.
    staged: threading.Event = field(default_factory=threading.Event)
    #: Name of the published checkpoint, or the error.
    outcome: Future[CheckpointName] = field(default_factory=Future)


class BackgroundSave:
    """Scheduler of one save in progress and at most one waiting snapshot (:mod:`.save_states`)."""

    def __init__(self, publisher: Publisher, clock: DeviceClock) -> None:
        self._publisher = publisher
        self._clock = clock
        # Completes the snapshots. Publishing takes separate threads, because a thread's priority can only be lowered.
        self._choose_gpu = same_gpu()
        self._copier = ThreadPoolExecutor(1, "checkpoint-copy", self._choose_gpu)
        self._copied = threading.Event()
        self._copied.set()
        self.state = SaveState.IDLE
        #: The save of SAVING and QUEUED, and the snapshot of QUEUED and WAITING.
        self._active: CheckpointSave | None = None
        self._waiting: CheckpointSave | None = None
        self._step_wait: StepWait | None = None
        #: Copy in progress that belongs to no save.
        self._copying: Future[None] | None = None
        self._was_late = False
        self._refused = 0
        self.outage = Outage(publisher.storage.base)
        #: Seconds from snapshot to publication of the last successful save, without waits for a core; equal on all
        #: ranks.
        self.publish_seconds = 0.0
        #: Last published checkpoint.
        self.published: CheckpointName | None = None

    def prepare(self) -> None:
        """Start the copying thread early, because ``Thread.start`` may block for milliseconds on busy cores."""
        self._copier.submit(int).result()

    def busy(self) -> bool:
        """Return True if a save is in progress on this rank; ranks may differ for a moment."""
        return self._active is not None and not self._active.outcome.done()

    def failing(self) -> bool:
        """Return True if training should not wait for the save in progress.

        That is so if the store does not answer this rank, or an earlier wait for a save was in vain.
        """
        return self._active is not None and (self._was_late or failed_since(self._active.started))

    def wait_briefly(self) -> None:
        """Wait for the save in progress, at most :data:`BRIEF_WAIT_S` seconds."""
        if self._active is not None:
            wait([self._active.outcome], timeout=BRIEF_WAIT_S)

    def wait_for_buffers(self) -> None:
        """Wait until no save in progress reads the buffers; a waiting snapshot may then be overwritten."""
        self.wait_for_copy()
        if self._active is not None and not self._active.outcome.done():
            self._active.staged.wait()

    def begin(self, step: int, complete: Callable[[], CheckpointSnapshot], *, late: bool) -> None:
        """Call ``complete`` in the background, and publish the snapshot that it returns.

        ``late`` means that the previous save is in progress on any rank; the snapshot is published after it. Raises
        like :meth:`resume`.
        """
        save = CheckpointSave(step, self.outage.now())
        self._was_late = late
        if not late:
            self._take_outcome()
        self.outage.add_unsaved(save.taken)
        self.advance(SaveEvent.LATE_SNAPSHOT if late else SaveEvent.SNAPSHOT, save)
        self._copied.clear()
        self._copier.submit(self._copy, complete, save, publish=not late)

    def advance(self, event: SaveEvent, snapshot: CheckpointSave | None = None) -> None:
        """Take the transition of ``event``; ``snapshot`` is that of SNAPSHOT and LATE_SNAPSHOT."""
        self.state, action = TRANSITIONS[self.state, event]
        match action:
            case SaveAction.PUBLISH_SNAPSHOT:
                self._active, self._waiting = snapshot, None
            case SaveAction.KEEP_SNAPSHOT:
                self._waiting = snapshot
            case SaveAction.PUBLISH_WAITING:
                assert self._waiting is not None
                self._active, self._waiting = self._waiting, None
                self.outage.add_unsaved(self._active.taken)
                # Runs after the copy: the copier works in order.
                self._copier.submit(self._start, self._active)
            case SaveAction.DROP:
                self._active = None
            case SaveAction.RETRY:
                assert self._active is not None
                again = CheckpointSave(self._active.step, self._active.taken, snapshot=self._active.snapshot)
                self._active, self._waiting = None, again

    def _copy(self, complete: Callable[[], CheckpointSnapshot], save: CheckpointSave, publish: bool) -> None:
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

    def _start(self, save: CheckpointSave) -> None:
        if save.outcome.done():  # its copy failed
            return
        try:
            threading.Thread(target=self._publish, args=(save,), name="checkpoint", daemon=True).start()
        except RuntimeError as error:  # the pod may have no more threads; an executor would hide the error
            save.staged.set()
            save.outcome.set_exception(error)

    def _publish(self, save: CheckpointSave) -> None:
        started = time.perf_counter()
        try:
            assert save.snapshot is not None
            self._choose_gpu()
            lower_thread_priority()
            waited = waited_for_processor_s()
            name = self._publisher.publish(save.snapshot, save.staged.set)
            took = time.perf_counter() - started, waited_for_processor_s() - waited
            self.publish_seconds = working_seconds(self._publisher.peers.gather(took))
        except BaseException as error:
            save.staged.set()
            save.outcome.set_exception(error)
        else:
            save.outcome.set_result(name)

    def resume(self, step: int, *, busy: bool) -> None:
        """Publish the waiting snapshot, unless a save is in progress on any rank (``busy``).

        Called after every ``step``. Raises ``Superseded`` if a later attempt has started, and ``UserError`` if more
        than :data:`TOLERATED_FAILURES` saves in a row were refused.
        """
        if not busy:
            self._take_outcome()
            self.advance(SaveEvent.FREE)
        warning = self.outage.warning(step) if self.waiting else ""
        if warning and self._publisher.peers.rank == 0:
            LOG.warning("%s", warning)

    def _take_outcome(self, *, tolerate: bool = True) -> None:
        """Record the result of the last save, if there is one; it has ended on all ranks.

        Raises its error, unless ``tolerate`` is True and another try may succeed.
        """
        save = self._active
        if save is None:
            return
        try:
            self.published = save.outcome.result()
        except StorageUnavailable as error:
            self.advance(SaveEvent.UNAVAILABLE)
            self.outage.why = str(error)
            if not tolerate:
                raise
        except UserError as error:
            self.advance(SaveEvent.FAILED)
            self._refused += 1
            if self._refused > TOLERATED_FAILURES or not tolerate:
                raise
            if self._publisher.peers.rank == 0:
                LOG.warning(
                    "checkpoint could not be saved: %s; training continues, and the next checkpoint retries", error
                )
        except BaseException:
            self.advance(SaveEvent.FAILED)
            raise
        else:
            self.advance(SaveEvent.SAVED)
            self._refused = 0
            if (again := self.outage.saved(save.step, save.taken)) and self._publisher.peers.rank == 0:
                LOG.info("%s", again)

    @property
    def waiting(self) -> bool:
        """True if any snapshot is not published yet; equal on all ranks."""
        return self.state is not SaveState.IDLE

    def finish(self, *, tolerate: bool = False) -> None:
        """Publish all snapshots, and wait until they are published.

        Raises the error of a failed save, unless ``tolerate`` is True.
        """
        self.wait_for_copy()
        while self.waiting:
            if self.state is SaveState.WAITING:
                self.advance(SaveEvent.FREE)
            assert self._active is not None
            wait([self._active.outcome])
            failed = self._active.outcome.exception() is not None
            newer = self.state is SaveState.QUEUED
            self._take_outcome(tolerate=tolerate or newer)
            if failed and not newer:
                return

    def copy(self, complete: Callable[[], None]) -> None:
        """Call ``complete`` in the background, after the newest snapshot; the next optimiser step waits for it."""
        self.wait_for_copy()
        self._copied.clear()
        self._copying = self._copier.submit(self._copy_only, complete)

    def _copy_only(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        finally:
            self._copied.set()

    def wait_for_copy(self) -> None:
        """Wait until the newest snapshot holds copies of all tensors; raise the error of :meth:`copy`."""
        self._copied.wait()
        if self._copying:
            copying, self._copying = self._copying, None
            copying.result()

    def delay_step(self) -> None:
        """Delay the optimiser step until the snapshot has copied all tensors that the step changes."""
        if not self._copied.is_set():
            reached, started, of_save = self._clock.mark(), time.perf_counter(), self._copying is None
            self.wait_for_copy()
            self._step_wait = StepWait(reached, started, time.perf_counter(), of_save)

    def pop_step_wait(self) -> StepWait | None:
        """Return and forget the last optimiser step's wait for a snapshot; None if it did not wait."""
        wait_before, self._step_wait = self._step_wait, None
        return wait_before

    def close(self) -> None:
        """Stop the copying thread without waiting for a save."""
        self._copier.shutdown(wait=False)
