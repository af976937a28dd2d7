"""Progress of preparation: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from slipstream.shared.logs import logger

SECONDS_BETWEEN_LINES = 10.0

Part = TypeVar("Part")


def with_progress(step: str, parts: Iterable[Part], rows: list[int]) -> Iterator[Part]:
    """Yield ``parts`` and report progress; ``rows`` has the number of rows of every part."""
    total, done, started = sum(rows), 0, time.monotonic()
    lines, last = not sys.stderr.isatty(), started
    with tqdm(total=total, desc=step, unit="row", unit_scale=True, leave=False, disable=lines) as bar:
        for part, count in zip(parts, rows, strict=True):
            yield part
            done += count
            bar.update(count)
            now = time.monotonic()
            if lines and now - last > SECONDS_BETWEEN_LINES and done < total:
                speed = done / (now - started)
                left = (total - done) / speed
                print(
                    f"prepare      {step}: {done:,} of {total:,} rows, {speed:,.0f} rows/s, {left:.0f} s left",
                    flush=True,
                )
                last = now


def say_resumed(done: int) -> None:
    """Log the number of units of work that an interrupted run had finished, if any."""
    if done:
        logger("prepare").info("resumes: %s units of work were done before", f"{done:,}")
