"""Spot capacity of a pod, from attempts of earlier trainings, a file, or a profile.

Interruptions of any cause are counted per hour for which pods were held. After k interruptions in t hours, the rate's
posterior is Gamma(k + 1/2, t) (Jeffreys' prior for a Poisson process). Hours until an interruption, and hours of
waiting for a new pod, are drawn from bootstrap resamples (Efron) of the recorded ones, so that few records give a wide
result. With fewer than :data:`ENOUGH` records they are exponential.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.errors import UserError

HOUR_S = 3600.0
#: Minimum recorded times for an empirical distribution, and number of resamples.
ENOUGH, RESAMPLED = 20, 200
#: Hours assumed for a wait for spot capacity if none was recorded; the output says so.
ASSUMED_WAIT = 1.0
FINISHED, KILLED = "finished", "killed"
#: Ends of attempts that were the training's own failures, not preemptions.
OWN_MISTAKE = re.compile(r"(Agreed)?UserError:|Stopped:|rank \d+ ran out of memory")
COLUMNS = ("up_hours", "wait_hours")


@dataclass(frozen=True)
class PastAttempt:
    """Attempt at a training: start (seconds since 1970, 0 if unknown), seconds, how it ended, and pods."""

    began_at: float
    seconds: float
    ended: str
    pods: int = 1


@dataclass(frozen=True)
class PodCapacity:
    """Interruptions and waits of one pod.

    ``rate`` is a profile's interruptions per pod and hour. If it is 0, the rate follows from ``interruptions`` in
    ``hours`` of held pods.
    """

    source: str
    interruptions: int = 0
    hours: float = 0.0
    rate: float = 0.0
    #: Hours that a pod was held before each interruption, and hours of each wait for a new pod.
    ups: tuple[float, ...] = ()
    waits: tuple[float, ...] = ()

    @property
    def between(self) -> float:
        """Mean hours between two interruptions of a pod."""
        return 1 / (self.rate or (self.interruptions + 0.5) / self.hours)

    @property
    def wait(self) -> float:
        """Mean hours of a wait for a new pod."""
        return float(np.mean(self.waits)) if self.waits else ASSUMED_WAIT

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of ``between``; None for a profile's rate, whose uncertainty is unknown."""
        if self.rate:
            return None
        from scipy.stats import gamma

        low, high = gamma.ppf((0.025, 0.975), self.interruptions + 0.5, scale=1 / self.hours)
        return float(1 / high), float(1 / low)

    def weather(self, pods: int, runs: int, random: np.random.Generator) -> SampledPreemptions:
        """Draw preemption traces for ``runs`` trainings; an interruption of any pod ends the whole attempt."""
        drawn = None if self.rate else random.gamma(self.interruptions + 0.5, 1 / self.hours, runs)
        rates = np.full(runs, self.rate) if drawn is None else drawn
        mean_waits = np.full(runs, self.wait)
        if len(self.waits) < ENOUGH and self.waits:
            mean_waits = len(self.waits) * self.wait / random.gamma(len(self.waits), 1, runs)
        ups = None
        if len(self.ups) >= ENOUGH:
            # Hours of uninterrupted attempts lengthen the times; more pods shorten them.
            unended = self.hours / sum(self.ups) if self.hours else 1.0
            ups = bootstrap_resamples(np.array(self.ups) * unended / pods, random)
        waits = bootstrap_resamples(np.array(self.waits), random) if len(self.waits) >= ENOUGH else None
        return SampledPreemptions(random, 1 / (np.maximum(rates, 1e-12) * pods), mean_waits, ups, waits)

    def __str__(self) -> str:
        low, high = self.interval() or (0.0, 0.0)
        sure = f" ({low:.3g} to {high:.3g})" if high else ""
        waits = f"{len(self.waits)} waits recorded" if self.waits else "assumed: no wait was recorded"
        often = f"an interruption of a pod every {self.between:.3g} h{sure}"
        return f"{often}, {self.source}; waits of {self.wait:.3g} h ({waits})"


@dataclass(frozen=True)
class SampledPreemptions:
    """Preemption traces: exponential hours with a mean per training, or draws from resampled hours."""

    random: np.random.Generator
    mean_ups: np.ndarray
    mean_waits: np.ndarray
    ups: np.ndarray | None = None
    waits: np.ndarray | None = None

    def up(self, chosen: np.ndarray) -> np.ndarray:
        return self._times(chosen, self.mean_ups, self.ups)

    def wait(self, chosen: np.ndarray) -> np.ndarray:
        return self._times(chosen, self.mean_waits, self.waits)

    def _times(self, chosen: np.ndarray, means: np.ndarray, table: np.ndarray | None) -> np.ndarray:
        if table is None:
            return means[chosen] * self.random.exponential(size=len(chosen))
        return table[chosen % len(table), self.random.integers(table.shape[1], size=len(chosen))]


def bootstrap_resamples(times: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return bootstrap resamples of ``times``; ``[RESAMPLED, len(times)]``."""
    return times[random.integers(len(times), size=(RESAMPLED, len(times)))]


def from_attempts(trainings: Sequence[Sequence[PastAttempt]]) -> PodCapacity | None:
    """Return the capacity from the attempts of trainings, oldest first; None if no pod was held.

    Every end of an attempt counts as an interruption, except completion and the training's own failures. A last attempt
    without a recorded end may still be running, so only its hours count.
    """
    ups, waits, hours = [], [], 0.0
    for attempts in trainings:
        for attempt, following in pairwise([*attempts, None]):
            if attempt is None:
                continue
            held = attempt.seconds * attempt.pods / HOUR_S
            hours += held
            unclear = attempt.ended.startswith(KILLED) and following is None
            if attempt.ended == FINISHED or unclear or OWN_MISTAKE.match(attempt.ended):
                continue
            ups.append(held)
            if following and attempt.began_at and following.began_at:
                waits.append(max(0.0, following.began_at - attempt.began_at - attempt.seconds) / HOUR_S)
    if not hours:
        return None
    source = f"{len(ups)} in {hours:.3g} pod-hours of {sum(map(len, trainings))} attempts"
    return PodCapacity(source, len(ups), hours, ups=tuple(ups), waits=tuple(waits))


def from_file(path: Path) -> PodCapacity:
    """Read recorded times: CSV with the columns up_hours and wait_hours, or a JSON object of two such lists.

    The last wait may be missing. Raises ``UserError`` for anything else.
    """
    try:
        content = path.read_bytes()
        values = columns_of_json(content) if path.suffix == ".json" else columns_of_csv(content.decode())
    except (OSError, ValueError, TypeError, AttributeError, KeyError, csv.Error) as error:
        raise UserError(
            f"{path}: cannot be read as recorded capacity: {error}; expected CSV with the columns "
            f"{' and '.join(COLUMNS)}, or JSON, an object of two lists with these names"
        ) from None
    ups, waits = values
    for name, times, least in ((COLUMNS[0], ups, 1), (COLUMNS[1], waits, 0)):
        if len(times) < least or not all(math.isfinite(time) and time >= 0 for time in times):
            raise UserError(f"{path}: {name}: expected hours of at least 0, and {least} of them or more")
    if not sum(ups):
        raise UserError(f"{path}: {COLUMNS[0]}: all are 0; expected times for which a pod was held")
    return PodCapacity(
        f"{len(ups)} in {sum(ups):.3g} pod-hours of {path.name}", len(ups), sum(ups), ups=ups, waits=waits
    )


def columns_of_json(content: bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    data: dict[str, Any] = parse_json(content)
    ups, waits = ([float(time) for time in data[name]] for name in COLUMNS)
    return tuple(ups), tuple(waits)


def columns_of_csv(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rows = list(csv.DictReader(text.splitlines()))
    ups, waits = ([float(row[name]) for row in rows if row[name]] for name in COLUMNS)
    return tuple(ups), tuple(waits)


def from_profile(name: str, preemptions_per_day: float) -> PodCapacity | None:
    """Return the capacity from a profile's preemption rate; None if it states none."""
    if preemptions_per_day <= 0:
        return None
    return PodCapacity(f"{preemptions_per_day:g} a day by the profile {name}", rate=preemptions_per_day / 24)
