"""Comparison of the interconnect with earlier profiles of the same fingerprint.

Launches are added until the answer is clear or the time is over. Every look at them may err, so the looks share the
error: the k-th gets 1 / (k (k + 1)) of it, which sums to the whole (alpha spending; Lan and DeMets, "Discrete
Sequential Boundaries for Clinical Trials", Biometrika 70, 1983).

Launches of the same network differ, and so do profiles of different days. A change is tested against both spreads:
between the launches of each profile, and between the earlier profiles. While these are too few, the known spread of
such profiles is used. The answer is "as before" only if the interval excludes a slow-down of 30 %; otherwise it is
"can't tell" (not significant), with the slow-down that could have been missed.

Launches may be of two kinds, depending on where the system placed them. With few launches, all earlier ones may be of
one kind and all new ones of the other, and their spread does not show it. So "slower" requires enough launches to make
that improbable, whatever the shares of the kinds (:func:`by_kind`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from slipstream.collectives.config import CollectivesConfig
from slipstream.collectives.engine import benchmark
from slipstream.collectives.launch.worker_group import WorkerGroup
from slipstream.interconnect.history import ProfileHistory
from slipstream.interconnect.profile import Measurement, NetworkProfile

Answer = Literal["slower", "as before", "can't tell"]
#: Probability of any "slower" in a comparison if nothing has changed.
FALSE_ALARMS = 0.01
#: The slow-down that "as before" excludes, and the smallest that counts as slower.
EXCLUDED, MATTERS = 0.30, 0.05
#: Standard deviation of the logarithm of a time between profiles of an unchanged network, used until there are
#: ``ENOUGH`` profiles to measure it. Over loopback it is a lower bound, because it is that of the machine's load.
DRIFT, LOOPBACK_DRIFT = 0.01, 0.25
ENOUGH = 4


@dataclass(frozen=True)
class Change:
    """Change of one operation at one size."""

    operation: str
    bytes: int
    answer: Answer
    #: New time over earlier time, and its interval at the level that ``FALSE_ALARMS`` leaves to the case.
    ratio: float
    low: float
    high: float
    #: A smaller slow-down may be missed; infinite if there are too few launches for "slower".
    unseen: float

    @property
    def decidable(self) -> bool:
        """True if "slower" was a possible answer."""
        return math.isfinite(self.unseen)

    def __str__(self) -> str:
        what = f"{self.operation} of {self.bytes} bytes" if self.bytes else self.operation
        times = f"{self.ratio:.2f} times as long as before ({self.low:.2g} to {self.high:.3g})"
        if self.answer == "can't tell":
            unseen = f"of less than {self.unseen:.0%}" if self.unseen < 10 else "even of 1000 %"
            why = f"a slow-down {unseen} would not be seen" if self.decidable else "too few launches, here or before"
            return f"{what}: can't tell ({why}): {times}"
        return f"{what}: {self.answer}: {times}"


def compare(earlier: Sequence[NetworkProfile], new: NetworkProfile, look: int = 1) -> tuple[Change, ...]:
    """Compare every operation at its smallest size (latency) and its largest (bandwidth).

    ``look`` counts the looks that could have found these launches slower, from 1. The result is empty without an
    earlier profile that shares a case with the new one.
    """
    without_network = new.fingerprint.world == 1 or new.topology.loopback
    drift = LOOPBACK_DRIFT if without_network else DRIFT
    cases = [(m, [found for old in earlier if (found := same_case(old, m))]) for m in judged(new)]
    cases = [(m, olds) for m, olds in cases if olds]
    return tuple(change(m, olds, drift, FALSE_ALARMS / len(cases), look) for m, olds in cases)


def overall(changes: Sequence[Change]) -> Answer:
    """Return "slower" if any change is slower, "as before" only if all are."""
    answers = {change.answer for change in changes}
    if "slower" in answers:
        return "slower"
    return "as before" if answers == {"as before"} else "can't tell"


def judged(profile: NetworkProfile) -> list[Measurement]:
    operations = dict.fromkeys(m.operation for m in profile.measurements)
    found = [profile.of(operation) for operation in operations]
    return [m for by_size in found for m in dict.fromkeys((by_size[0], by_size[-1]))] if all(found) else []


def same_case(profile: NetworkProfile, case: Measurement) -> Measurement | None:
    alike = (m for m in profile.of(case.operation) if (m.bytes, m.in_place) == (case.bytes, case.in_place))
    return next(alike, None)


def logs(measurement: Measurement) -> np.ndarray:
    """Return the logarithm of every launch's 10th percentile; float64 ``[launches]``.

    This percentile is the least disturbed by other processes of a machine.
    """
    return np.log([float(np.percentile(launch.seconds, 10)) for launch in measurement.launches])


def change(new: Measurement, earlier: Sequence[Measurement], drift: float, level: float, look: int) -> Change:
    """Test one case with a t interval for the difference of the means of logarithms.

    ``level`` is one-sided and covers all looks together.
    """
    before, now = [logs(m) for m in earlier], logs(new)
    told = by_kind(sum(map(len, before)), len(now)) <= level
    profiles = len(before)
    if profiles < ENOUGH:
        # Too few profiles to measure their spread are merged: the launches of each may all be of one kind, and then
        # only all of them together have a spread.
        before = [np.concatenate(before)]
    difference = float(now.mean() - np.mean([group.mean() for group in before]))
    half = half_width(before, now, profiles, drift, level / (look * (look + 1)))
    answer: Answer = "can't tell"
    if told and difference - half > 0 and difference >= np.log1p(MATTERS):
        answer = "slower"
    elif difference + half < np.log1p(EXCLUDED):
        answer = "as before"
    ratio, low, high = (float(np.exp(difference + sign * half)) for sign in (0, -1, 1))
    # A true slow-down of twice the half width is found unless chance exceeds a whole half width.
    unseen = float(np.expm1(2 * half)) if told else float("inf")
    return Change(new.operation, new.bytes, answer, ratio, low, high, unseen)


def by_kind(before: int, now: int) -> float:
    """Return the probability that all launches before are of one kind and all now of the other.

    Assumes two kinds with the shares that make this most likely. Further looks add nothing: the event has occurred at
    the first or never.
    """
    return (before / (before + now)) ** before * (now / (before + now)) ** now


def half_width(before: Sequence[np.ndarray], now: np.ndarray, profiles: int, drift: float, level: float) -> float:
    """Return the half width of the interval for the mean of ``now`` less the mean of ``before``'s means.

    The groups ``before`` come from ``profiles`` profiles.
    """
    groups = [*before, now]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < 1:
        return float("inf")  # a single launch each: their spread is unknown
    within = float(sum(((group - group.mean()) ** 2).sum() for group in groups)) / freedom
    of_launches = within * (1 / len(now) + sum(1 / len(group) for group in before) / len(before) ** 2)
    between = drift**2
    if profiles >= ENOUGH:
        means = np.array([group.mean() for group in before])
        measured = float(means.var(ddof=1))
        between = max(measured, drift**2) if drift == LOOPBACK_DRIFT else measured
        freedom = min(freedom, profiles - 1) if measured > within else freedom
    return float(stdtrit(freedom, 1 - level)) * float(np.sqrt(of_launches + between * (1 + 1 / profiles)))


#: Most earlier profiles that are read, the newest first.
MOST = 30


def compare_with_history(workers: WorkerGroup, config: CollectivesConfig, directory: Path) -> None:
    """Measure a profile and compare it with the history; all processes of ``workers`` call this.

    Launches beyond ``collectives.launches`` are added while the answer is "can't tell", for at most
    ``collectives.compare_seconds``. The answer is written above the profile's table. Writes and raises like
    :func:`~slipstream.collectives.engine.benchmark`.
    """
    comparison = HistoryComparison(config)
    benchmark(workers, config, directory, reuse=False, enough=comparison.enough, answer=comparison.text)


class HistoryComparison:
    """Comparison with the earlier profiles of the same fingerprint."""

    def __init__(self, config: CollectivesConfig) -> None:
        self._history, self._ends = config.history, time.monotonic() + config.compare_seconds
        self._earlier: Sequence[NetworkProfile] | None = None
        self._changes: tuple[Change, ...] = ()
        #: Looks at which "slower" was a possible answer: only they can raise a false alarm.
        self._looks = 0

    def enough(self, profile: NetworkProfile) -> bool:
        """Return True if further launches are unnecessary or impossible."""
        if self._earlier is None:
            self._earlier = ProfileHistory(self._history, profile.fingerprint).profiles(MOST)
        self._changes = compare(self._earlier, profile, self._looks + 1)
        self._looks += any(change.decidable for change in self._changes)
        return not self._changes or overall(self._changes) != "can't tell" or time.monotonic() > self._ends

    def text(self) -> str:
        if not self._changes:
            return (
                "nothing to compare with: the history has no earlier profile of this hardware, or none of these "
                "cases\n\n"
            )
        count = len(self._earlier or ())
        profiles = f"{count} earlier profile{'s' if count > 1 else ''} of the same hardware"
        return "\n".join(
            [f"{overall(self._changes)}, against {profiles}", *(f"  {change}" for change in self._changes), "", ""]
        )
