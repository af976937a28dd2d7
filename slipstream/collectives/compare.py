"""Measure until it is clear whether the network is slower than it was, or the time is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.collectives.config import CollectivesConfig
from slipstream.collectives.engine import benchmark
from slipstream.collectives.launch.worker_group import WorkerGroup
from slipstream.collectives.regression import Change, compare, overall
from slipstream.interconnect.history import ProfileHistory
from slipstream.interconnect.profile import NetworkProfile

#: Earlier profiles that are read: the youngest.
MOST = 30


def compare_with_history(workers: WorkerGroup, config: CollectivesConfig, directory: Path) -> None:
    """Measure a profile, with more launches than ``collectives.launches`` while nothing can be told and for at most
    ``collectives.compare_seconds``; the answer stands above its table. All processes of ``workers`` call this.

    Writes and raises like :func:`~slipstream.collectives.engine.benchmark`.
    """
    comparison = HistoryComparison(config)
    benchmark(workers, config, directory, reuse=False, enough=comparison.enough, answer=comparison.text)


class HistoryComparison:
    """The earlier profiles of the same fingerprint, and what has become of the network since."""

    def __init__(self, config: CollectivesConfig) -> None:
        self._history, self._ends = config.history, time.monotonic() + config.compare_seconds
        self._earlier: Sequence[NetworkProfile] = ()
        self._changes: tuple[Change, ...] = ()

    def enough(self, profile: NetworkProfile) -> bool:
        """Whether no more launches are needed, or possible."""
        self._earlier = ProfileHistory(self._history, profile.fingerprint).profiles(MOST)
        self._changes = compare(self._earlier, profile)
        return not self._changes or overall(self._changes) != "can't tell" or time.monotonic() > self._ends

    def text(self) -> str:
        if not self._changes:
            return (
                "nothing to compare with: the history has no earlier profile of this hardware, or none of these "
                "cases\n\n"
            )
        count = len(self._earlier)
        profiles = f"{count} earlier profile{'s' if count > 1 else ''} of the same hardware"
        return "\n".join(
            [f"{overall(self._changes)}, against {profiles}", *(f"  {change}" for change in self._changes), "", ""]
        )
