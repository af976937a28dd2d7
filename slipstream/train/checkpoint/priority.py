"""Background work that gives way to training steps where both want the same processor."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: At 19 a save of 300 MB took 14 s beside steps that wanted every processor, at 12 these took 1.15 times as long.
NICENESS = 16
SCHEDULING = Path("/proc/thread-self/schedstat")


def give_way() -> None:
    """Give this thread a low priority, for the rest of its life: without privileges there is no way back. On a
    processor that is idle, as when training waits for the thread, it is as fast as before."""
    # Elsewhere a priority is that of a whole process.
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def given_way_s() -> float:
    """Seconds for which this thread had work and no processor; 0 where the system does not tell."""
    try:
        return int(SCHEDULING.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def needed(took: Sequence[tuple[float, float]]) -> float:
    """The seconds of a save without those in which it gave way, of all ranks' both. Ranks wait for each other, so that
    the longest wait of one is in the time of all."""
    return max(0.0, max(seconds for seconds, _ in took) - max(waited for _, waited in took))
