"""What a person sees while a model trains: a bar on a terminal, a line now and then elsewhere. Rank 0 only."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class ProgressReport:
    """Shows how far training is. It only writes: nothing that it measures flows back into training."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self._total = total
        self._lines = shown and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, desc="train", unit="step", disable=not shown or self._lines, leave=False
        )
        self._last_line = time.monotonic()

    def step(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def evaluated(self, done: int, evaluation: dict[str, float]) -> None:
        names = [name for name in ("loss", "accuracy", "rmse") if name in evaluation]
        figures = "  ".join(f"{name} {evaluation[name]:.4f}" for name in names)
        self._bar.set_postfix_str(figures)
        if self._lines and (time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES or done == self._total):
            self._last_line = time.monotonic()
            where = f"step {done}/{self._total}  epoch {evaluation['epoch']:.1f}"
            print(f"train        {where}  validation {figures}", flush=True)

    def close(self) -> None:
        self._bar.close()
