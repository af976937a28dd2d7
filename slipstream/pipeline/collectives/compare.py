"""Comparison of the interconnect with earlier profiles of the same fingerprint.

Launches are added until the result is significant or the time is over. Every interim test may raise a false alarm. So
the k-th gets 1 / (k (k + 1)) of the error level; these shares sum to 1 (alpha spending; Lan and DeMets, "Discrete
Sequential Boundaries for Clinical Trials", Biometrika 70, 1983).

Times vary between launches and between profiles of different days. A change is tested against both variances; with few
profiles, a known variance between profiles replaces the measured one. The answer is "as before" only if the interval
excludes a slow-down of 30 %; otherwise it is "can't tell" (not significant), with the slow-down that could have been
missed.

A launch may be slow or fast only because of where its processes were placed. So "slower" requires enough
launches to make that improbable (:func:`by_kind`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.engine import benchmark_interconnect
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.shared.interconnect.history import ProfileHistory
from slipstream.shared.interconnect.profile import Measurement, NetworkProfile

Answer = Literal["slower", "as before", "can't tell"]
#: Probability that a comparison answers "slower" for any case although nothing has changed.
FALSE_ALARMS = 0.01
#: "as before" excludes a slow-down of 30 %; "slower" needs at least 5 %.
EXCLUDED, MATTERS = 0.30, 0.05
#: Standard deviation of the logarithm of a time between profiles of an unchanged network, used with fewer than
#: ``ENOUGH`` profiles. Over loopback it reflects the machine's load and remains the lower bound with more profiles.
DRIFT, LOOPBACK_DRIFT = 0.01, 0.25
ENOUGH = 4
#: Number of launches above which no command is recommended.
MOST_LAUNCHES = 1000


@dataclass(frozen=True)
class OperationChange:
    """Change of one operation at one size."""

    operation: str
    bytes: int
    answer: Answer
    #: Time now / time before, with its interval at the level ``FALSE_ALARMS`` / number of cases.
    ratio: float
    low: float
    high: float
    #: Smallest slow-down that would be found, as a fraction; infinite if there are too few launches for "slower".
    unseen: float
    #: Number of launches after which the answer would be "slower", with this interval; 0 if more launches do not decide.
    needs: int = 0

    @property
    def is_doubtful(self) -> bool:
        """True if it is slower, or may be, as its interval excludes 1."""
        return self.answer == "slower" or (self.answer == "can't tell" and self.low > 1)

    @property
    def decidable(self) -> bool:
        """True if there were enough launches to answer "slower"."""
        return math.isfinite(self.unseen)

    def __str__(self) -> str:
        what = f"{self.operation} of {self.bytes} bytes" if self.bytes else self.operation
        times = f"{self.ratio:.2f} times as long as before ({self.low:.2g} to {self.high:.3g})"
        if self.answer == "can't tell":
            unseen = f"of less than {self.unseen:.0%}" if self.unseen < 10 else "even of 1000 %"
            few = f"too few launches, {self.needs} would tell" if self.needs else "too few launches, here or before"
            why = f"a slow-down {unseen} would not be seen" if self.decidable else few
            return f"{what}: can't tell ({why}): {times}"
        return f"{what}: {self.answer}: {times}"


def compare_profiles(
    earlier: Sequence[NetworkProfile], new: NetworkProfile, look: int = 1
) -> tuple[OperationChange, ...]:
    """Compare every operation at its smallest size (latency) and its largest (bandwidth).

    ``look`` is the number of this interim test, from 1; tests that could not answer "slower" do not count. Returns ()
    if no earlier profile shares a case with ``new``.
    """
    without_network = new.fingerprint.world == 1 or new.topology.loopback
    drift = LOOPBACK_DRIFT if without_network else DRIFT
    cases = [(m, [found for old in earlier if (found := same_case(old, m))]) for m in compared_measurements(new)]
    cases = [(m, olds) for m, olds in cases if olds]
    return tuple(compare_case(m, olds, drift, FALSE_ALARMS / len(cases), look) for m, olds in cases)


def overall_answer(changes: Sequence[OperationChange]) -> Answer:
    """Return "slower" if any change is slower, "as before" if all are, else "can't tell"."""
    answers = {change.answer for change in changes}
    if "slower" in answers:
        return "slower"
    return "as before" if answers == {"as before"} else "can't tell"


def compared_measurements(profile: NetworkProfile) -> list[Measurement]:
    operations = dict.fromkeys(m.operation for m in profile.measurements)
    found = [profile.of(operation) for operation in operations]
    return [m for by_size in found for m in dict.fromkeys((by_size[0], by_size[-1]))] if all(found) else []


def same_case(profile: NetworkProfile, case: Measurement) -> Measurement | None:
    alike = (m for m in profile.of(case.operation) if (m.bytes, m.in_place) == (case.bytes, case.in_place))
    return next(alike, None)


def log_seconds_by_launch(measurement: Measurement) -> np.ndarray:
    """Return the logarithm of every launch's 10th percentile of seconds; float64 ``[launches]``.

    Other processes on a machine disturb this percentile least.
    """
    return np.log([float(np.percentile(launch.seconds, 10)) for launch in measurement.launches])


def compare_case(
    new: Measurement, earlier: Sequence[Measurement], drift: float, level: float, look: int
) -> OperationChange:
    """Test one case with a t interval for the difference of the mean logarithms.

    ``level`` is the one-sided error of all interim tests together.
    """
    before, now = [log_seconds_by_launch(m) for m in earlier], log_seconds_by_launch(new)
    told = by_kind(sum(map(len, before)), len(now)) <= level
    profiles = len(before)
    if profiles < ENOUGH:
        # The variance between so few profiles is unknown, so their launches are pooled: all launches of one profile may
        # be placed alike, and then only the pool shows their spread.
        before = [np.concatenate(before)]
    difference = float(now.mean() - np.mean([group.mean() for group in before]))
    half = half_width(before, now, profiles, drift, level / (look * (look + 1)))
    answer: Answer = "can't tell"
    if told and difference - half > 0 and difference >= np.log1p(MATTERS):
        answer = "slower"
    elif difference + half < np.log1p(EXCLUDED):
        answer = "as before"
    ratio, low, high = (float(np.exp(difference + sign * half)) for sign in (0, -1, 1))
    # A true slow-down of twice the half width is missed only if the measurement errs by more than the half width.
    unseen = float(np.expm1(2 * half)) if told else float("inf")
    needs = 0
    if not told and difference - half > 0:
        needs = launches_needed(sum(map(len, before)), len(now), level)
    return OperationChange(new.operation, new.bytes, answer, ratio, low, high, unseen, needs)


def launches_needed(before: int, now: int, level: float) -> int:
    """Return the number of launches now from which on placement alone explains a difference at ``level`` or less."""
    return next((number for number in range(now, MOST_LAUNCHES) if by_kind(before, number) <= level), 0)


def by_kind(before: int, now: int) -> float:
    """Return the probability that old and new launches differ in placement alone.

    All ``before`` launches are then placed one way and all ``now`` another, both with the most adverse frequencies.
    Interim tests do not raise it: this happens at the first or never.
    """
    return (before / (before + now)) ** before * (now / (before + now)) ** now


def half_width(before: Sequence[np.ndarray], now: np.ndarray, profiles: int, drift: float, level: float) -> float:
    """Return the half width of the interval for mean(``now``) - mean of the means of ``before``.

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


#: Maximum number of earlier profiles that are read, the newest first.
MOST = 30


def compare_with_history(workers: WorkerGroup, config: CollectivesConfig, directory: Path) -> None:
    """Measure a profile and compare it with the history; all processes of ``workers`` call this.

    While the answer is "can't tell", launches are added beyond ``collectives.launches``, for at most
    ``collectives.compare_seconds``. The answer is written above the profile's table. Files and errors are those of
    :func:`~slipstream.pipeline.collectives.engine.benchmark_interconnect`.
    """
    comparison = HistoryComparison(config)
    benchmark_interconnect(
        workers,
        config,
        directory,
        reuse=False,
        enough=comparison.enough,
        answer=comparison.text,
        doubtful=comparison.is_doubtful,
    )


class HistoryComparison:
    """Comparison with the earlier profiles of the same fingerprint."""

    def __init__(self, config: CollectivesConfig) -> None:
        self._history, self._began, self._seconds = config.history, time.monotonic(), config.compare_seconds
        #: Seconds of a launch so far.
        self._per_launch = 0.0
        self._earlier: Sequence[NetworkProfile] | None = None
        self._changes: tuple[OperationChange, ...] = ()
        #: Number of interim tests with enough launches to answer "slower"; the others cannot raise a false alarm.
        self._looks = 0

    def enough(self, profile: NetworkProfile) -> bool:
        """Return True if the answer is clear, the time is over, or nothing is comparable."""
        if self._earlier is None:
            found = ProfileHistory(self._history, profile.fingerprint).profiles(MOST)
            self._earlier = [each for each in found if not each.doubtful]
        passed = time.monotonic() - self._began
        self._per_launch = passed / max(1, profile.launches)
        self._changes = compare_profiles(self._earlier, profile, self._looks + 1)
        self._looks += any(change.decidable for change in self._changes)
        return not self._changes or overall_answer(self._changes) != "can't tell" or passed > self._seconds

    def is_doubtful(self) -> bool:
        """Return True if an operation is slower, or may be: later comparisons then do not use this profile."""
        return any(change.is_doubtful for change in self._changes)

    def _time_needed(self) -> Iterator[str]:
        """Yield how many seconds would decide about intervals that exclude 1."""
        if needs := max((change.needs for change in self._changes), default=0):
            seconds = math.ceil(self._per_launch * needs / 10) * 10
            yield f"collectives.compare_seconds of {seconds} would tell: {needs} launches like these"

    def _kept_out(self) -> Iterator[str]:
        if self.is_doubtful():
            yield (
                "later comparisons do not use this profile, as the network may be degraded; if it is to stay so, "
                "run slipstream collectives benchmark"
            )

    def text(self) -> str:
        if not self._changes:
            return (
                "nothing to compare with: the history has no earlier profile of this hardware, or none of these "
                "cases\n\n"
            )
        count = len(self._earlier or ())
        profiles = f"{count} earlier profile{'s' if count > 1 else ''} of the same hardware"
        return "\n".join(
            [
                f"{overall_answer(self._changes)}, against {profiles}",
                *(f"  {change}" for change in self._changes),
                *(f"  {line}" for line in (*self._time_needed(), *self._kept_out())),
                "",
                "",
            ]
        )
