"""Progress of training, shown by rank 0: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from slipstream.artifacts.results.training import ValidationPoint

SECONDS_BETWEEN_LINES = 5.0


class ProgressReport:
    """Shows the progress of training; it measures nothing that training uses."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self._total = total
        self._lines = shown and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, desc="train", unit="step", disable=not shown or self._lines, leave=False
        )
        self._last_line = time.monotonic()

    def step(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def evaluated(self, done: int, evaluation: ValidationPoint) -> None:
        figures = f"loss {evaluation.loss:.4f}"
        for name, value in (("accuracy", evaluation.accuracy), ("rmse", evaluation.rmse)):
            if value is not None:
                figures += f"  {name} {value:.4f}"
        self._bar.set_postfix_str(figures)
        if self._lines and (time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or done == self._total):
            self._last_line = time.monotonic()
            where = f"step {done}/{self._total}  epoch {evaluation.epoch:.1f}"
            print(f"train        {where}  validation {figures}", flush=True)

    def close(self) -> None:
        self._bar.close()
