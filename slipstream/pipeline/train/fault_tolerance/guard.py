"""Guard that limits the work lost by failures: saves checkpoints, and stops before a preemption.

Called after every step, it combines preemption notices, the ranks' consensus, the checkpoint interval, the checkpoints
and the goodput record. All ranks call it at the same points and do the same at the same step. The ranks exchange
notices

- before the first step, for notices from start-up and restore; there is nothing to save yet;
- between steps;
- between the batches of an evaluation. The next attempt repeats an interrupted evaluation completely.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.device_clock import DeviceClock
from slipstream.pipeline.train.fault_tolerance.consensus import (
    PERIOD_S,
    CheckpointInterval,
    Consensus,
    ExchangeSchedule,
    GroupState,
    RankTimings,
    StopDecision,
)
from slipstream.pipeline.train.fault_tolerance.goodput import SAVED, GoodputRecorder
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.pipeline.train.telemetry.marks import ProcessorWait, StepMarks, StepTiming
from slipstream.pipeline.train.telemetry.step_times import StepTimes
from slipstream.shared.artifacts.results.ledger import DATA_WAIT, EVALUATION, STALL, STEPS
from slipstream.shared.errors import AgreedPreempted, Preempted
from slipstream.shared.logs import logger

#: Number of recent saves whose median stall is used, so that one save on a busy machine does not distort it.
STALLS = 5
LOG = logger("train")
#: Function that returns the arguments of :meth:`.Checkpoints.save` (progress, this rank's own state), or None if the
#: current state must not be saved. It must call :meth:`Guard.finished` for all enqueued steps first.
Capture = Callable[[], tuple[object, object] | None]
T = TypeVar("T")


class Guard:
    """Exchanges, saves and stops between steps.

    The host runs ahead of the device: steps are :meth:`enqueued` before earlier ones are :meth:`completed_future`.
    Recorded times are the device's: a wait of the host counts only while the device was idle.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        interval: CheckpointInterval,
        watcher: NoticeWatcher,
        recorder: GoodputRecorder,
        clock: DeviceClock | None = None,
        unsaved_limit_s: float = math.inf,
    ) -> None:
        """Create the guard; if no save finishes for ``unsaved_limit_s`` seconds, training waits for one."""
        self._checkpoints = checkpoints
        self._unsaved_limit_s = unsaved_limit_s
        self._clock = clock or DeviceClock()
        self._idle_since = 0.0
        self.interval = interval
        self._consensus = Consensus(watcher, checkpoints.peers)
        self._schedule = ExchangeSchedule()
        self.recorder = recorder
        self._group_state: GroupState | None = None
        self._finished = self._saved = 0
        self.times = StepTimes(checkpoints.peers.rank, checkpoints.peers.world)
        self._processor_wait, self._paused = ProcessorWait(), 0.0
        self._previous: StepTiming | None = None
        self._stalls: deque[float] = deque(maxlen=STALLS)
        self._advised = False

    def begin(self, step: int) -> None:
        """Start training at ``step``, which is the initial state or already saved.

        Raises ``AgreedPreempted`` if a machine already has a preemption notice.
        """
        self.recorder.begin(step)
        self._checkpoints.background.outage.begin(step)
        self._saved = step
        stop = self._exchange(0.0).stop
        if stop:
            self._exit(AgreedPreempted(f"stopped before the first step ({stop.why})"))

    def before_step(self) -> StepMarks:
        """Return timestamps to pass to :meth:`enqueued`, for a step that is about to be enqueued."""
        return StepMarks(self._clock, self._pauses())

    def enqueued(self, start: StepMarks, waited: float = 0.0) -> StepTiming:
        """Return the timing of a step that was just enqueued; ``waited`` is the host's wait for its batch (s)."""
        snapshot_wait = self._checkpoints.background.pop_step_wait()
        return StepTiming(
            start, self._clock.mark(), waited, snapshot_wait, self._pauses(), self._processor_wait.seconds()
        )

    def finished(self, step: int, timing: StepTiming) -> None:
        """Wait until the device has finished step number ``step``, and record its times.

        Call it for steps in the order in which they were enqueued.
        """
        places = timing.wait()
        stall = timing.snapshot_wait.stall() if timing.snapshot_wait else 0.0
        self.recorder.add(STEPS, places.end - places.begin - stall)
        data_wait = timing.data_wait(places.begin, self._idle_since)
        self.recorder.add(DATA_WAIT, data_wait)
        if timing.snapshot_wait and timing.snapshot_wait.of_save:
            self._add_stall(stall)
        else:
            self.recorder.add(STALL, stall)
        self.recorder.record.last_step = step
        if self._previous is not None:  # before the first step the ranks wait for each other
            idle = places.begin - self._idle_since
            self.times.add(timing.phases(places, self._previous, idle, data_wait, stall))
        self._idle_since, self._previous = places.end, timing
        self._finished += 1

    def after_step(self, step: int, capture: Capture) -> None:
        """Exchange and save, if due, once ``step`` steps are enqueued.

        Raises ``AgreedPreempted`` if a machine has a preemption notice, after saving a checkpoint if there is time.
        """
        began = time.perf_counter()
        if self._schedule.due(step):
            self._exchange_after(step, capture)
        if self._checkpoint_due(step):
            self._save(step, capture)
        self._paused += time.perf_counter() - began

    def _pauses(self) -> float:
        """Return the seconds spent between steps so far: exchanges, saves, evaluations."""
        return self._paused + self.recorder.record.seconds[EVALUATION]

    def evaluating(self, batches: Iterator[T], rounds: int, step: int, capture: Capture) -> Iterator[T]:
        """Yield this rank's batches of the evaluation after ``step``, with exchanges between them.

        No rank has more than ``rounds`` batches; ranks with fewer still take part in the exchanges. Raises like
        :meth:`after_step`.
        """
        schedule, started = ExchangeSchedule(), time.perf_counter()
        for finished in range(rounds):
            if schedule.due(finished):
                state = self._exchange((time.perf_counter() - started) / finished)
                schedule.exchanged(finished, state.slowest.step_s)
                if state.stop:
                    self._stop(step, state.stop, capture)
            batch = next(batches, None)
            if batch is not None:
                yield batch

    def wait_for_copy(self) -> None:
        """Wait until the last save has copied all tensors, so that tensors of the progress may change."""
        self._checkpoints.background.wait_for_copy()

    def copy(self, complete: Callable[[], None]) -> None:
        """Complete a copy of the weights in the background; see :meth:`.BackgroundSave.copy`."""
        self._checkpoints.background.copy(complete)

    # A rank that waits for data cannot exchange, because the others are already in the next step and wait for its
    # gradient. If its own machine is preempted and the data does not arrive in time for a checkpoint, the rank stops
    # alone, and the others lose their connection to it.
    def waiting(self) -> None:
        """Stop this rank if a preemption leaves too little time for a checkpoint by all ranks.

        Called regularly while this rank waits for data. Raises :class:`Preempted` on this rank only.
        """
        stop = self._consensus.local_stop()
        if stop and not stop.time_to_save(self._checkpoints.background.publish_seconds):
            self._exit(Preempted(f"stopped while waiting for data, with step {self._saved} saved ({stop.why})"))

    def _exchange(self, each_s: float) -> GroupState:
        background, stall_s = self._checkpoints.background, statistics.median(self._stalls) if self._stalls else 0.0
        measured = RankTimings(
            each_s, stall_s, background.publish_seconds, background.outage.unsaved_s, background.busy()
        )
        return self._consensus.exchange(measured, self.times)

    def _exchange_after(self, step: int, capture: Capture) -> None:
        state = self._exchange_and_publish(step, capture)
        if state.slowest.unsaved_s > self._unsaved_limit_s:
            with self.recorder.time(STALL):
                state = self._wait_until_saved(step, capture)
        self._group_state = state
        self._schedule.exchanged(step, state.slowest.step_s)
        if state.advised and not self._advised:
            # Amid skipped steps there is nothing to save; the next exchange tries again.
            self._advised = self._save(step, capture)

    def _exchange_and_publish(self, step: int, capture: Capture) -> GroupState:
        """Exchange, stop on a preemption notice, and publish the waiting snapshot if no save is in progress."""
        state = self._exchange(self.recorder.record.seconds[STEPS] / max(1, self._finished))
        if state.stop:
            self._stop(step, state.stop, capture)
        self._checkpoints.background.resume(step, busy=bool(state.slowest.saving))
        self._record_published()
        return state

    def _wait_until_saved(self, step: int, capture: Capture) -> GroupState:
        """Wait until the store accepts a checkpoint, because ``training.unsaved_limit`` is exceeded."""
        if self._consensus.leads:
            LOG.warning(
                "training paused: no checkpoint could be saved for %g s (training.unsaved_limit)", self._unsaved_limit_s
            )
        while (state := self._exchange_and_publish(step, capture)).slowest.unsaved_s > self._unsaved_limit_s:
            time.sleep(PERIOD_S)
        return state

    def _checkpoint_due(self, step: int) -> bool:
        if self._saved == step:
            return False
        if self.interval.steps:
            # At multiples, so that the steps do not depend on where the attempt started.
            return step % self.interval.steps == 0
        state = self._group_state
        return state is not None and step - self._saved >= self.interval.between(state.slowest)

    def _save(self, step: int, capture: Capture) -> bool:
        """Save a checkpoint; return False if the current state must not be saved."""
        captured = capture()
        if captured is None:
            return False
        progress, rank_state = captured
        stall = self._checkpoints.save(step, progress, rank_state=rank_state)
        self._stalls.append(0.0)
        self._add_stall(stall)
        self._record_published()
        self._saved = step
        if not (self._group_state and self._group_state.slowest.stall_s):
            # Exchange the measured stall at once: before the first save the interval is based on a guess.
            self._schedule.exchange_by(step + 1)
        return True

    def _record_published(self) -> None:
        published = self._checkpoints.background.published
        if published and self.recorder.record.saved_step != published.step:
            self.recorder.record.saved_step = published.step
            self.recorder.event(SAVED)

    def _add_stall(self, seconds: float) -> None:
        """Add ``seconds`` to the stall of the last save."""
        if seconds:
            self._stalls[-1] += seconds
            self.recorder.add(STALL, seconds)

    def _stop(self, step: int, stop: StopDecision, capture: Capture) -> NoReturn:
        """Save if the checkpoint can be published before the deadline, and raise ``AgreedPreempted``."""
        saved = self._saved == step
        if not saved and stop.time_to_save(self._checkpoints.background.publish_seconds):
            saved = self._save(step, capture)
        if saved:
            with self.recorder.time(STALL):
                self._checkpoints.finish()
            self.recorder.record.saved_step = step
        safe = "saved" if saved else f"with step {self._saved} saved"
        self._exit(AgreedPreempted(f"stopped at step {step}, {safe} ({stop.why})"))

    def _exit(self, preempted: Preempted) -> NoReturn:
        self.recorder.end(str(preempted))
        raise preempted

    def collect_times(self) -> None:
        """Exchange the times of the last steps; all ranks must call this."""
        self._exchange(0.0)

    def close(self) -> None:
        """Record that the run is finished."""
        self.recorder.end("finished")
