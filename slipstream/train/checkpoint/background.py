"""The save in progress: its snapshot is completed beside the steps, then published by a thread that gives way to
them, where both want the same processor.

The steps go on while a store stays away, and it is said now and then what a loss would cost. One snapshot at most waits
until the save in progress has ended, and a newer one takes its place, since there is one set of buffers. A save that
the store did not take waits, too, and is tried again. All ranks call :meth:`BackgroundSave.begin`,
:meth:`~BackgroundSave.resume` and :meth:`~BackgroundSave.finish` at the same points, knowing whether a save is in
progress on any of them, so that all publish the same snapshots in the same order.
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

from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import StorageUnavailable
from slipstream.storage.retry import failed_since
from slipstream.train.checkpoint.home import Name
from slipstream.train.checkpoint.publish import Publisher, Snapshot
from slipstream.train.device_clock import DeviceClock, Mark
from slipstream.train.gpu_threads import same_gpu

#: At 19 a save of 300 MB took 14 s beside steps that wanted every processor, at 12 these took 1.15 times as long.
NICENESS = 16
SCHEDULING = Path("/proc/thread-self/schedstat")
#: Seconds without a save from which on a store that has not failed, but is not done either, is worth a warning.
SLOW_S = 60.0
#: Saves in a row that may be refused (a full disk, a right that is missing) before training stops.
TOLERATED_FAILURES = 2
#: Seconds at a time for which the steps wait for a save that is still in progress when the next is due.
BRIEF_WAIT_S = 0.05

LOG = logger("checkpoint")


def lower_thread_priority() -> None:
    """Give this thread a low priority, for the rest of its life: without privileges there is no way back. On a
    processor that is idle, as when training waits for the thread, it is as fast as before."""
    # Elsewhere a priority is that of a whole process.
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def waited_for_processor_s() -> float:
    """Seconds for which this thread had work and no processor; 0 where the system does not tell."""
    try:
        return int(SCHEDULING.read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def working_seconds(took: Sequence[tuple[float, float]]) -> float:
    """The seconds of a save without those in which it gave way, of all ranks' both. Ranks wait for each other, so that
    the longest wait of one is in the time of all."""
    return max(0.0, max(seconds for seconds, _ in took) - max(waited for _, waited in took))


@dataclass
class Outage:
    """Since when nothing has been saved to ``home``. ``now`` is a clock in seconds."""

    home: str
    now: Callable[[], float] = time.monotonic
    #: The step of the last checkpoint, and when its snapshot was taken.
    step: int = 0
    since: float = field(init=False)
    #: When the first snapshot was taken that is not saved yet; None if there is none.
    first_unsaved: float | None = None
    #: Why the last save failed; "" if it did not.
    why: str = ""
    #: The seconds without a save after which there is a warning.
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.now()

    @property
    def seconds(self) -> float:
        """How old the work is that a loss would cost."""
        return self.now() - self.since

    @property
    def unsaved_s(self) -> float:
        """For how long there has been a snapshot that is not saved; 0 without one."""
        return 0.0 if self.first_unsaved is None else self.now() - self.first_unsaved

    def add_unsaved(self, taken: float) -> None:
        """A snapshot that was ``taken`` then is to be saved."""
        self.first_unsaved = taken if self.first_unsaved is None else self.first_unsaved

    def begin(self, step: int) -> None:
        """The work begins at ``step``."""
        self.step, self.since = step, self.now()

    def saved(self, step: int, taken: float) -> str:
        """A checkpoint of ``step`` is published, whose snapshot was ``taken`` then. Returns what to say of it, if there
        was a warning."""
        self.step, self.since, self.why, self.first_unsaved = step, taken, "", None
        warned, self._next_s = self._next_s > 0, 0.0
        return f"saved again: step {step} at {self.home}" if warned else ""

    def warning(self, step: int) -> str:
        """A sentence, once nothing can be saved, and again each time that the loss has doubled; else empty."""
        lost_s = self.seconds
        if lost_s < (self._next_s or (0.0 if self.why else SLOW_S)):
            return ""
        self._next_s = max(2 * lost_s, 1.0)
        why = f" ({self.why})" if self.why else ""
        return (
            f"nothing saved at {self.home} for {lost_s:.0f} s{why}: a loss now would cost {step - self.step} steps; "
            "training goes on, and saves as soon as it can"
        )


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
    #: When the snapshot was taken, on the clock of :class:`~slipstream.train.checkpoint.background.Outage`.
    taken: float
    started: float = field(default_factory=time.monotonic)
    #: None until it is copied.
    snapshot: Snapshot | None = None
    #: Set once the buffers may be used for the next snapshot.
    staged: threading.Event = field(default_factory=threading.Event)
    outcome: Future[Name] = field(default_factory=Future)


class BackgroundSave:
    """One save at a time, and one snapshot that waits."""

    def __init__(self, publisher: Publisher, clock: DeviceClock) -> None:
        self._publisher = publisher
        self._clock = clock
        # Completes the snapshots; publishing takes threads of its own, as a thread's priority can only be lowered.
        self._choose_gpu = same_gpu()
        self._copier = ThreadPoolExecutor(1, "checkpoint-copy", self._choose_gpu)
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
        return self._active is not None and not self._active.outcome.done()

    def failing(self) -> bool:
        """Whether the save in progress is not worth waiting for: the store does not answer this rank, or the save was
        late before."""
        return self._active is not None and (self._was_late or failed_since(self._active.started))

    def wait_briefly(self) -> None:
        """Wait for the save in progress, a moment at most."""
        if self._active is not None:
            wait([self._active.outcome], timeout=BRIEF_WAIT_S)

    def wait_for_buffers(self) -> None:
        """Wait until the buffers hold nothing that is still to be written; a snapshot that waits may be overwritten."""
        self.wait_for_copy()
        if self._active is not None and not self._active.outcome.done():
            self._active.staged.wait()

    def begin(self, step: int, complete: Callable[[], Snapshot], *, late: bool) -> None:
        """Have ``complete`` called, and its result published: at once, or if the save before was ``late`` on any rank,
        after it. Raises as :meth:`resume` does."""
        save = Save(step, self.outage.now())
        self._was_late = late
        if not late:
            self._take_outcome()
        self.outage.add_unsaved(save.taken)
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
        if save.outcome.done():  # its copy failed
            return
        try:
            threading.Thread(target=self._publish, args=(save,), name="checkpoint", daemon=True).start()
        except RuntimeError as error:  # the pod may have no more threads; in an executor nobody would hear of it
            save.staged.set()
            save.outcome.set_exception(error)

    def _publish(self, save: Save) -> None:
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
        """Between two steps, ``step`` being the last: publish the snapshot that waits, unless a save is in progress on
        any rank (``busy``).

        Raises ``UserError`` if more than :data:`TOLERATED_FAILURES` saves in a row were refused, and ``Superseded``. A
        store that stays away is a warning, now and then.
        """
        if not busy:
            self._take_outcome()
            self._publish_waiting()
        warning = self.outage.warning(step) if self.waiting else ""
        if warning and self._publisher.peers.rank == 0:
            LOG.warning("%s", warning)

    def _publish_waiting(self) -> None:
        """Publish the snapshot that waits, if there is one; no save is in progress."""
        if self._waiting is not None:
            self._active, self._waiting = self._waiting, None
            self.outage.add_unsaved(self._active.taken)
            # After its copy: the copier works in order.
            self._copier.submit(self._start, self._active)

    def _take_outcome(self, *, tolerate: bool = True) -> None:
        """Take in the outcome of the last save, which is over on all ranks. Raises its error, or tolerates it."""
        save, self._active = self._active, None
        if save is None:
            return
        try:
            self.published = save.outcome.result()
        except StorageUnavailable as error:
            self.outage.why = str(error)
            self._waiting = self._waiting or Save(save.step, save.taken, snapshot=save.snapshot)
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
            self._take_outcome(tolerate=tolerate or newer)
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
