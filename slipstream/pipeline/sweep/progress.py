"""Display of a sweep's progress: a bar on a terminal, and a line per ended trial."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import RLock
from types import TracebackType

from tqdm import tqdm

from slipstream.pipeline.sweep.records import TrialEnded, TrialHistory
from slipstream.pipeline.sweep.space import values_in_words
from slipstream.pipeline.sweep.store import best_trial, loss_of


class TrialProgressDisplay:
    """Display of how many of at most ``trials`` trials have ended; not thread-safe."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self._bar: tqdm | None = None

    def __enter__(self) -> TrialProgressDisplay:
        tqdm.set_lock(RLock())  # tqdm's own is a multiprocessing lock, reported as leaked at exit
        self._bar = tqdm(total=self._trials, desc="sweep", unit="trial", disable=not sys.stderr.isatty(), leave=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, trials: Sequence[TrialHistory]) -> None:
        if self._bar is not None:
            self._bar.update(sum(trial.ended is not None for trial in trials) - self._bar.n)

    def ended(self, trial: TrialHistory, how: TrialEnded, trials: Sequence[TrialHistory]) -> None:
        done, best = sum(each.ended is not None for each in trials), best_trial(list(trials))
        beside = f"; best {loss_of(best.ended):.4g}, trial {best.number}" if best else ""
        line = (
            f"sweep        {done}/{self._trials}  trial {trial.number} {in_words(how)}  "
            f"({values_in_words(trial.values)}){beside}"
        )
        with tqdm.external_write_mode(file=sys.stdout):
            print(line, flush=True)
        self.show(trials)


def in_words(how: TrialEnded) -> str:
    """Format a trial's end, such as ``pruned, loss 0.3121 after 2.0 epochs``."""
    if how.state == "failed":
        return f"failed: {how.reason}"
    where = f" after {how.curve[-1].progress / 1000:.1f} epochs" if how.state == "pruned" and how.curve else ""
    return f"{how.state}, loss {how.loss:.4g}{where}"
