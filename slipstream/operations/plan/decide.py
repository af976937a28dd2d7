"""Time and cost of every option, on spot and on demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipstream.operations.plan.capacity import PodCapacity, from_profile
from slipstream.operations.plan.estimate import WorkTime, work_time
from slipstream.operations.plan.measured import MeasuredTraining
from slipstream.operations.plan.money import HOUR_S, TrainingHours, break_even, own_interval
from slipstream.operations.plan.options import InstanceOption
from slipstream.operations.plan.simulation import RUNS, PreemptionRules, simulate_trainings
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.profile import NetworkProfile

SPOT, ON_DEMAND = "spot", "on demand"
#: Number of simulated sweeps, each of many trainings.
SWEEPS = 1_000
#: Hours between interruptions that represent none (on demand).
NEVER = 1e9
#: A save is started after a preemption notice only if ``MARGIN`` times its duration plus ``LEAVE_S`` seconds remain.
MARGIN, LEAVE_S = 1.5, 2.0


@dataclass(frozen=True)
class TrainingRequirements:
    """Planned work and its limits.

    The training runs ``trials`` times, ``parallel`` at a time, on ``rows`` rows per trial (None: as measured).
    ``deadline`` is in hours and ``budget`` in dollars, both to be kept with 95 % probability. ``capacity`` replaces the
    profiles' rates.
    """

    trials: int = 1
    parallel: int = 1
    deadline: float | None = None
    budget: float | None = None
    capacity: PodCapacity | None = None
    rows: int | None = None


@dataclass(frozen=True)
class SimulatedRange:
    """Median, 5 % and 95 % quantiles over simulated runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> SimulatedRange:
        low, median, high = (float(value) for value in np.quantile(values, (0.05, 0.5, 0.95), method="higher"))
        return cls(median, low, high)


@dataclass(frozen=True)
class SimulatedOutcome:
    """Simulated outcome of all planned work with an option, for ``way`` :data:`SPOT` or :data:`ON_DEMAND`."""

    way: str
    hours: SimulatedRange
    dollars: SimulatedRange
    mean_dollars: float
    #: Per training: mean interruptions, and the retries that suffice for 99 of 100 trainings.
    interruptions: float
    retries: int
    #: Seconds between checkpoints, which the trainer derives from the seconds between failures.
    checkpoint_s: float
    between_failures_s: float | None
    #: Fraction of the runs within the deadline; 1 without a deadline.
    in_time: float

    def keeps(self, wanted: TrainingRequirements) -> bool:
        """Return True if deadline and budget are each kept with 95 % probability."""
        return (wanted.deadline is None or self.hours.high <= wanted.deadline) and (
            wanted.budget is None or self.dollars.high <= wanted.budget
        )


@dataclass(frozen=True)
class PlannedOption:
    """Planned option: whether it fits into memory, its time and outcomes.

    ``pays_from``: hours between a pod's interruptions from which spot is cheaper, if any.
    """

    option: InstanceOption
    fits: bool
    time: WorkTime | None
    outcomes: tuple[SimulatedOutcome, ...] = ()
    pays_from: float | None = None
    #: Reason why there is no spot outcome; "" if there is.
    no_spot: str = ""

    def outcome(self, way: str) -> SimulatedOutcome | None:
        return next((each for each in self.outcomes if each.way == way), None)


def plan_options(
    planned: MeasuredTraining,
    runs: Sequence[MeasuredTraining],
    options: Iterable[InstanceOption],
    networks: Sequence[NetworkProfile],
    wanted: TrainingRequirements,
) -> list[PlannedOption]:
    """Return a row for every option, the cheapest first.

    Raises ``UserError`` if no option has the memory or a price, or the deadline is shorter than the work of every one.
    """
    rows = [row_of(planned, option, runs, networks, wanted) for option in options]
    fitting = [row for row in rows if row.fits]
    if not fitting:
        raise UserError(
            f"{planned.name}: its peak of {planned.memory_bytes / 1e9:.3g} GB in a process fits into no GPU of the "
            "price file; expected a smaller micro-batch, or divide the model (training.parallel)"
        )
    shortest = min((each.hours.low for row in fitting for each in row.outcomes), default=None)
    if shortest is None:
        names = ", ".join(dict.fromkeys(row.option.profile or row.option.instance.name for row in fitting))
        raise UserError(
            f"{names}: fits, but has no price on demand, and spot is not planned: {fitting[0].no_spot}; expected "
            "price_per_hour, or spot_price_per_hour and preemptions_per_day, in [distributed], or --capacity"
        )
    if wanted.deadline is not None and wanted.deadline < shortest:
        raise UserError(
            f"--deadline {wanted.deadline:.3g}h: is shorter than the work, {shortest:.3g} h on the fastest that fits; "
            "expected more hours, or fewer trials or more at a time"
        )
    return sorted(rows, key=lambda row: min((each.mean_dollars for each in row.outcomes), default=np.inf))


def row_of(
    planned: MeasuredTraining,
    option: InstanceOption,
    runs: Sequence[MeasuredTraining],
    networks: Sequence[NetworkProfile],
    wanted: TrainingRequirements,
) -> PlannedOption:
    if not option.gpu.fits(planned.memory_bytes):
        return PlannedOption(option, fits=False, time=None)
    time = work_time(planned, runs, option.gpu, option.processes, networks)
    scale = 1.0 if wanted.rows is None else wanted.rows / planned.rows
    job_at = partial(planned_job, planned, time.seconds * scale)
    capacity, no_spot = capacity_of(option, wanted)
    outcomes = [simulate_option(option, ON_DEMAND, job_at(NEVER), None, time, wanted)]
    pays_from = None
    if capacity:
        rules = option_rules(option, planned)
        between = capacity.between / option.pods
        outcomes.append(simulate_option(option, SPOT, job_at(between), capacity, time, wanted, rules))
        spot, full = option.per_hour(spot=True), option.per_hour(spot=False)
        if spot and full:
            pays = break_even(job_at, spot / full, rules.noticed)
            pays_from = None if pays is None else pays * option.pods
    return PlannedOption(option, True, time, tuple(each for each in outcomes if each), pays_from, no_spot)


def planned_job(planned: MeasuredTraining, work_s: float, between: float) -> TrainingHours:
    """Return the planned job for interruptions ``between`` hours apart.

    Start and save times are measured; the checkpoint interval is the trainer's choice.
    """
    stall, publish = planned.stall_s / HOUR_S, planned.figures.save_seconds / HOUR_S
    every = own_interval(stall, publish, between)
    return TrainingHours(work_s / HOUR_S, every, stall, publish, planned.start_s / HOUR_S)


def capacity_of(option: InstanceOption, wanted: TrainingRequirements) -> tuple[PodCapacity | None, str]:
    """Return the spot capacity of the option's pods and "", or None and why spot is not planned."""
    if option.per_hour(spot=True) is None:
        return None, "no spot price"
    per_day = option.placement.preemptions_per_day if option.placement else 0.0
    capacity = wanted.capacity or from_profile(option.profile, per_day)
    return capacity, "" if capacity else "its preemption rate is unknown"


def option_rules(option: InstanceOption, planned: MeasuredTraining) -> PreemptionRules:
    """Return the preemption rules of an option.

    A pod has time for a save if its profile watches for notices and a save fits into the grace period. Only a single
    pod falls back to on-demand capacity.
    """
    grace = option.placement.grace_seconds if option.placement else 0
    saves = grace > MARGIN * planned.figures.save_seconds + LEAVE_S
    return PreemptionRules(1.0 if option.notices and saves else 0.0, falls_back=option.pods == 1)


def simulate_option(
    option: InstanceOption,
    way: str,
    job: TrainingHours,
    capacity: PodCapacity | None,
    time: WorkTime,
    wanted: TrainingRequirements,
    rules: PreemptionRules = PreemptionRules(),  # noqa: B008 - it is frozen
) -> SimulatedOutcome | None:
    """Simulate an option on spot or on demand (``way``); None without a price for that."""
    random = np.random.default_rng(0)  # common random numbers: options differ only by themselves
    per_hour, on_demand = option.per_hour(spot=way == SPOT), option.per_hour(spot=False)
    if per_hour is None:
        return None
    several = wanted.trials > 1
    # The machine's slowdown against the prediction is common to all trainings of a sweep.
    slower = np.ones(RUNS) if several else time.factors(random, RUNS)
    weather = (capacity or PodCapacity("", rate=1 / NEVER)).weather(option.pods, RUNS, random)
    found = simulate_trainings(job, weather, rules, random, slower)
    # The spot price, drawn from its range, is common to all trainings of a sweep.
    spread = option.price.spot_spread if way == SPOT else 0.0
    prices = per_hour * np.random.default_rng(1).uniform(1 - spread, 1 + spread, SWEEPS if several else RUNS)
    hours = found.hours
    dollars = found.dollars(per_hour if several else prices, on_demand or per_hour)
    if several:
        factors = time.factors(random, SWEEPS)
        hours, dollars = (amounts * factors for amounts in sweep_totals(hours, dollars, wanted, random))
        dollars = dollars * prices / per_hour
    between = capacity.between / option.pods if capacity else None
    often = float(np.mean(found.interruptions))
    return SimulatedOutcome(
        way=way,
        hours=SimulatedRange.of(hours),
        dollars=SimulatedRange.of(dollars),
        mean_dollars=float(np.mean(dollars)),
        interruptions=often if capacity else 0.0,
        retries=int(np.quantile(found.interruptions, 0.99, method="higher")) if capacity and option.pods > 1 else 0,
        checkpoint_s=job.every * HOUR_S,
        between_failures_s=between * HOUR_S if between else None,
        in_time=1.0 if wanted.deadline is None else float(np.mean(hours <= wanted.deadline)),
    )


def sweep_totals(
    hours: np.ndarray, dollars: np.ndarray, wanted: TrainingRequirements, random: np.random.Generator
) -> list[np.ndarray]:
    """Return hours and dollars of sweeps whose trainings are drawn from the simulated ones.

    A trial waits while ``wanted.parallel`` others run.
    """
    free = np.zeros((SWEEPS, min(wanted.parallel, wanted.trials)))
    costs, sweeps = np.zeros(SWEEPS), np.arange(SWEEPS)
    for _ in range(wanted.trials):
        chosen = random.integers(len(hours), size=SWEEPS)
        free[sweeps, free.argmin(axis=1)] += hours[chosen]
        costs += dollars[chosen]
    return [free.max(axis=1), costs]
