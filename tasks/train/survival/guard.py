"""What keeps a run from losing more than it must: called after every step, it saves, and leaves when the machine goes.

It joins the parts: the watcher's notices, the ranks' agreement, the interval, the checkpoints, the ledger. All ranks
call it side by side, and whatever it does, all do at the same step. Where they ask each other:

- before the first step, for what came during start-up and restore: until then there is nothing to save;
- between steps;
- between the batches of an evaluation. One that is broken off is made again, whole, by the attempt that goes on.

A rank that waits for data cannot ask: its peers are in the next step already and wait for its gradient. When its own
machine goes and the data does not come in time for a save, it leaves alone, and its peers lose it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from tasks.errors import Interrupted
from tasks.train.checkpoint import Checkpoints
from tasks.train.survival.checkpoint_interval import Interval
from tasks.train.survival.consensus import Agreed, Agreement, Pace, Stop
from tasks.train.survival.goodput import STALL, STEPS, Ledger
from tasks.train.survival.notices import Watcher

#: What a save costs is the median of so many: one that a busy machine held up does not count.
STALLS = 5
#: Gives what :meth:`~tasks.train.checkpoint.Checkpoints.save` takes: the progress, and what is this rank's own.
Capture = Callable[[], tuple[Any, Any]]
T = TypeVar("T")


class Preempted(Interrupted):
    """The machine is being taken away and the run has left in good order; another attempt can go on."""


class Guard:
    """Between two steps: ask, save, leave."""

    def __init__(self, checkpoints: Checkpoints, interval: Interval, watcher: Watcher, ledger: Ledger) -> None:
        self._checkpoints = checkpoints
        self._interval = interval
        self._agreement = Agreement(watcher)
        self._pace = Pace()
        self._ledger = ledger
        self._known: Agreed | None = None
        self._first = self._saved = 0
        self._stalls: deque[float] = deque(maxlen=STALLS)
        self._advised = False

    def begin(self, step: int) -> None:
        """Steps are counted from ``step``; it is saved already, or there is nothing to save. Raises :class:`Preempted`
        on all ranks when a machine goes already."""
        self._ledger.begin(step)
        self._first = self._saved = step
        stop = self._question(0.0).stop
        if stop:
            self._left(f"left before its first step ({stop.why})")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one optimiser step, data and evaluation apart."""
        with self._ledger.time(STEPS):
            yield
            self._stalled(self._checkpoints.waited())

    def after_step(self, step: int, capture: Capture) -> None:
        """``step`` steps are finished. Raises :class:`Preempted` on all ranks when one of their machines goes, after
        saving if there is time for it."""
        self._ledger.step(step)
        if self._pace.due(step):
            self._ask(step, capture)
        if self._due(step):
            self._save(step, capture)

    def evaluating(self, batches: Iterator[T], rounds: int, step: int, capture: Capture) -> Iterator[T]:
        """This rank's batches of the evaluation after ``step``. No rank has more than ``rounds``; one that has fewer
        takes part in the questions all the same. Raises as :meth:`after_step` does."""
        self._ledger.step(step)
        pace, started = Pace(), time.perf_counter()
        for done in range(rounds):
            if pace.due(done):
                known = self._question((time.perf_counter() - started) / done)
                pace.asked(done, known.step_s)
                if known.stop:
                    self._leave(step, known.stop, capture)
            batch = next(batches, None)
            if batch is not None:
                yield batch

    def waiting(self) -> None:
        """Called now and then while this rank waits for data. Raises :class:`Preempted` on this rank alone when its
        machine goes and too little time is left for its peers to save with it."""
        stop = self._agreement.alone()
        if stop and not stop.time_to_save(self._checkpoints.publish_seconds):
            self._left(f"left waiting for data, with step {self._saved} saved ({stop.why})")

    def _question(self, each_s: float) -> Agreed:
        return self._agreement.ask(
            step_s=each_s,
            stall_s=statistics.median(self._stalls) if self._stalls else 0.0,
            publish_s=self._checkpoints.publish_seconds,
        )

    def _ask(self, step: int, capture: Capture) -> None:
        known = self._known = self._question(self._ledger.page.seconds[STEPS] / max(1, step - self._first))
        self._pace.asked(step, known.step_s)
        if known.stop:
            self._leave(step, known.stop, capture)
        if known.advised and not self._advised:
            self._advised = True
            self._save(step, capture)

    def _due(self, step: int) -> bool:
        if self._saved == step:
            return False
        if self._interval.steps:
            # At the same steps whatever happened before.
            return step % self._interval.steps == 0
        known = self._known
        return known is not None and step - self._saved >= self._interval.between(
            step_s=known.step_s, stall_s=known.stall_s, publish_s=known.publish_s
        )

    def _save(self, step: int, capture: Capture) -> None:
        progress, own = capture()
        stall = self._checkpoints.save(step, progress, own=own)
        self._stalls.append(0.0)
        self._stalled(stall)
        if self._checkpoints.published:
            self._ledger.saved(self._checkpoints.published.step)
        self._saved = step
        # What it cost is agreed at once: before the first save the interval was a guess.
        self._pace.soon(step + 1)

    def _stalled(self, seconds: float) -> None:
        """The last save cost the loop so many seconds more."""
        if seconds:
            self._stalls[-1] += seconds
            self._ledger.add(STALL, seconds)

    def _leave(self, step: int, stop: Stop, capture: Capture) -> None:
        """Save if that can be finished before the deadline; what cannot is not begun."""
        saved = self._saved == step
        if not saved and stop.time_to_save(self._checkpoints.publish_seconds):
            self._save(step, capture)
            saved = True
        if saved:
            with self._ledger.time(STALL):
                self._checkpoints.finish()
            self._ledger.saved(step)
        self._left(f"left at step {step}, {'saved' if saved else f'with step {self._saved} saved'} ({stop.why})")

    def _left(self, said: str) -> NoReturn:
        self._ledger.end(said)
        raise Preempted(said)

    def close(self, how: str = "finished") -> None:
        """The run ends."""
        self._ledger.end(how)
        self._agreement.close()
