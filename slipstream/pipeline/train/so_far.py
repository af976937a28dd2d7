"""Live training progress, which rank 0 writes to a file for the parent process to display.

A background thread writes the loop's state. It cannot fail a training or delay a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.pipeline.train.periodically import call_periodically
from slipstream.shared.artifacts.records import decode_record, to_json
from slipstream.shared.artifacts.results.ledger import DATA_WAIT, KILLED, STALL, STEPS, AttemptRecord, read_attempts
from slipstream.shared.artifacts.results.training import LiveAttempt, LiveProgress
from slipstream.shared.storage import storage_for

PERIOD_S = 5.0


@contextmanager
def progress_written(path: Path | None, look: Callable[[], LiveProgress]) -> Iterator[None]:
    """Write the results of ``look`` to ``path`` during the block and once at its end; nothing if ``path`` is None."""
    if path is None:
        yield
        return
    with call_periodically(
        lambda: write_progress(path, look()),
        PERIOD_S,
        PERIOD_S,
        "so far",
        "live training progress could not be written",
    ):
        yield


def write_progress(path: Path, so_far: LiveProgress) -> None:
    """Replace the file at ``path`` atomically."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_bytes(to_json(so_far))
    beside.replace(path)


def read_progress(path: Path, home: str, batch_size: int, *, running: bool) -> LiveProgress | None:
    """Return the progress that rank 0 wrote last, with all attempts in the checkpoint directory ``home``.

    None if rank 0 runs on another machine or has written nothing yet, or if the file is damaged. Raises the store's
    errors.
    """
    if not path.exists():
        return None
    so_far = decode_record(path.read_bytes(), LiveProgress)
    if so_far is None:
        return None
    return dataclasses.replace(so_far, attempts=live_attempts(read_attempts(storage_for(home)), batch_size, running))


def live_attempts(records: Sequence[AttemptRecord], batch_size: int, running: bool) -> list[LiveAttempt]:
    """Return the progress of all attempts, oldest first; the last is unfinished if ``running``."""
    found = []
    for record in records:
        seconds = sum(record.seconds[name] for name in (STEPS, DATA_WAIT, STALL))
        runs = running and record is records[-1] and record.ended == KILLED
        found.append(
            LiveAttempt(
                record.attempt,
                record.world,
                record.first_step,
                record.saved_step,
                record.last_step,
                record.wall,
                record.executed * batch_size / seconds if record.executed and seconds else None,
                "" if runs else record.ended,
            )
        )
    return found
