"""What keeps a run from losing more than it must: called after every step, it saves, and leaves when the machine goes.

It joins the parts: the watcher's notices, the ranks' agreement, the interval, the checkpoints, the ledger. All ranks
call it side by side, and whatever it does, all do at the same step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tasks.errors import Interrupted
from tasks.train.checkpoint import Checkpoints
from tasks.train.interval import Interval
from tasks.train.ledger import STALL, STEPS, Ledger
from tasks.train.preemption import Watcher
from tasks.train.stop import Agreed, Agreement, Stop

#: What a save costs is the median of so many: one that a busy machine held up does not count.
STALLS = 5
#: Gives what :meth:`~tasks.train.checkpoint.Checkpoints.save` takes: the progress, and what is this rank's own.
Capture = Callable[[], tuple[Any, Any]]


class Preempted(Interrupted):
    """The machine is being taken away and the run has left in good order; another attempt can go on."""


class Guard:
    """Between two steps: ask, save, leave."""

    def __init__(self, checkpoints: Checkpoints, interval: Interval, watcher: Watcher, ledger: Ledger) -> None:
        self._checkpoints = checkpoints
        self._interval = interval
        self._agreement = Agreement(watcher)
        self._ledger = ledger
        self._known: Agreed | None = None
        self._first = self._saved = 0
        self._stalls: deque[float] = deque(maxlen=STALLS)
        self._advised = False

    def begin(self, step: int) -> None:
        """Steps are counted from ``step``; it is saved already, or there is nothing to save."""
        self._ledger.begin(step)
        self._first = self._saved = step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one optimiser step, data and evaluation apart."""
        with self._ledger.time(STEPS):
            yield

    def after_step(self, step: int, capture: Capture) -> None:
        """``step`` steps are finished. Raises :class:`Preempted` on all ranks when one of their machines goes, after
        saving if there is time for it."""
        self._ledger.step(step)
        if self._agreement.due(step):
            self._ask(step, capture)
        if self._due(step):
            self._save(step, capture)

    def _ask(self, step: int, capture: Capture) -> None:
        known = self._known = self._agreement.ask(
            step,
            step_s=self._ledger.page.seconds[STEPS] / max(1, step - self._first),
            stall_s=statistics.median(self._stalls) if self._stalls else 0.0,
            publish_s=self._checkpoints.publish_seconds,
        )
        if known.stop:
            self._leave(step, known.stop, capture)
        if known.advised and not self._advised:
            self._advised = True
            self._save(step, capture)

    def _due(self, step: int) -> bool:
        known = self._known
        if known is None:
            return self._interval.steps > 0 and step - self._saved >= self._interval.steps
        return step - self._saved >= self._interval.between(
            step_s=known.step_s, stall_s=known.stall_s, publish_s=known.publish_s
        )

    def _save(self, step: int, capture: Capture) -> None:
        progress, own = capture()
        stall = self._checkpoints.save(step, progress, own=own)
        self._ledger.add(STALL, stall)
        if self._checkpoints.published:
            self._ledger.saved(self._checkpoints.published.step)
        self._stalls.append(stall)
        self._saved = step
        # What it cost is agreed at once: before the first save the interval was a guess.
        self._agreement.soon(step + 1)

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
        said = f"left at step {step}, {'saved' if saved else f'with step {self._saved} saved'} ({stop.why})"
        self._ledger.end(said)
        raise Preempted(said)

    def close(self, how: str = "finished") -> None:
        """The run ends."""
        self._ledger.end(how)
        self._agreement.close()
