"""Monthly on-demand cost of every variant on every instance.

Also the cost of batch scoring, and the savings of scaling to zero and of optimisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slipstream.operations.plan.serving.hosts import ServingInstance, ServingTime, serving_time
from slipstream.operations.plan.serving.load import DAY_S, HOUR_S, HOURS, MONTH_S, RequestLoad
from slipstream.operations.plan.serving.model import FP32, MeasuredModel
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.operations.plan.serving.recorded_queue import MOST_BUSY, RecordedQueue, replicas_by_hour
from slipstream.shared.artifacts.results.export import VariantFigures
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import duration

#: Days per month.
DAYS = MONTH_S / DAY_S
#: Seconds without a request after which KEDA by default removes the last replica (`cooldownPeriod`).
COOLDOWN_S = 300.0
#: Months in which an optimisation has to pay for itself.
MONTHS = 6
#: Relative accuracy of the rate up to which instances suffice.
NEAR = 1e-3


@dataclass(frozen=True)
class ServingRequirements:
    """Limits and assumptions of a serving plan.

    ``p99`` is seconds; ``cold_start`` is seconds from the request for an instance to its first answer; ``effort`` is
    the dollars of an optimisation (None: unknown).
    """

    p99: float
    cold_start: float
    effort: float | None = None


@dataclass(frozen=True)
class Replicas:
    """Replicas and instances by hour of the day (24 each), largest p99 in seconds, and dollars a month."""

    replicas: tuple[int, ...]
    instances: tuple[int, ...]
    p99: float
    dollars: float


@dataclass(frozen=True)
class ServingOption:
    """Variant on an instance type.

    ``planned`` is None if a single request exceeds the p99. ``at_worst`` assumes the largest known prediction error; it
    equals ``planned`` for measured times.
    """

    variant: str
    host: ServingInstance
    time: ServingTime
    planned: Replicas | None
    at_worst: Replicas | None
    #: Dollars a month of scoring each day's requests at night on one instance.
    nightly: float

    @property
    def dollars(self) -> float:
        """Dollars a month; infinite if the p99 cannot be kept."""
        return self.planned.dollars if self.planned else math.inf

    @property
    def worst_dollars(self) -> float:
        return self.at_worst.dollars if self.at_worst else math.inf


@dataclass(frozen=True)
class ScaleToZero:
    """Effect of scaling to zero between requests.

    ``pays_from`` is the idle fraction of time from which it pays, at the recorded number of idle periods (else one a
    day); ``idle`` is the recorded fraction; ``saves`` is dollars a month (may be negative); ``spells`` is idle periods
    a month; ``late`` is the fraction of requests that take longer than the p99; ``backlog`` is the seconds from the
    request for an instance until the backlog of its start is gone, at most.
    """

    pays_from: float
    idle: float
    saves: float
    spells: float
    late: float
    backlog: float


def plan_serving_options(
    model: MeasuredModel,
    variants: Sequence[VariantFigures],
    found: Sequence[ServingInstance],
    load: RequestLoad,
    wanted: ServingRequirements,
) -> list[ServingOption]:
    """Return a row for every variant and instance with known times, the cheapest first.

    Raises ``UserError`` if there is none, or if a single request exceeds the p99 on all.
    """
    times = [(each, host, serving_time(model, each, host)) for each in variants for host in found]
    known = [(each, host, time) for each, host, time in times if isinstance(time, ServingTime)]
    if not known:
        raise UserError(
            f"{model.name}: the latency of a request is unknown on every instance: {times[0][2]}; expected prices of "
            "the instance that it was exported on (--prices), or runs/…"
        )
    fastest = min(known, key=lambda each: each[2].planned.p99)
    if fastest[2].planned.p99 > wanted.p99:
        raise UserError(
            f"--p99 {duration(wanted.p99)}: is below one request, which takes "
            f"{duration(fastest[2].planned.p99)} (99 %) without waiting on the fastest, "
            f"{fastest[0].name} on {fastest[1].name}; expected more"
        )
    memory: dict[ServiceTimes, tuple[tuple[int, ...], float] | None] = {}
    rows = [row_of(each.name, host, time, load, wanted, memory) for each, host, time in known]
    return sorted(rows, key=lambda row: (row.dollars, row.worst_dollars, row.nightly))


def row_of(
    variant: str,
    host: ServingInstance,
    time: ServingTime,
    load: RequestLoad,
    wanted: ServingRequirements,
    memory: dict[ServiceTimes, tuple[tuple[int, ...], float] | None],
) -> ServingOption:
    def replicas(service: ServiceTimes) -> Replicas | None:
        if service not in memory:
            memory[service] = replicas_by_hour(load.arrivals, load.rates, service, wanted.p99)
        found = memory[service]
        if found is None:
            return None
        instances = [math.ceil(each / host.holds) for each in found[0]]
        dollars = paid_hours(instances, wanted.cold_start) * host.per_hour * DAYS
        return Replicas(found[0], tuple(instances), found[1], dollars)

    night = load.month / DAYS / (time.rows_per_second * host.holds) + wanted.cold_start
    return ServingOption(
        variant,
        host,
        time,
        replicas(time.planned),
        replicas(time.at_worst),
        nightly=night / HOUR_S * host.per_hour * DAYS,
    )


def paid_hours(instances: Sequence[int], cold_start: float) -> float:
    """Return a day's paid instance hours, including starts before the hour that needs them."""
    started = sum(max(0, now - before) for before, now in pairwise([instances[-1], *instances]))
    return sum(instances) + started * cold_start / HOUR_S


def recommended_option(rows: Sequence[ServingOption]) -> ServingOption | None:
    """Return the cheapest row that keeps the p99 even at the largest prediction error, else the cheapest."""
    kept = [row for row in rows if row.planned]
    return next((row for row in sorted(kept, key=lambda row: row.at_worst is None)), None)


def scale_to_zero(row: ServingOption, load: RequestLoad, wanted: ServingRequirements) -> ScaleToZero:
    """Return the effect of scaling to zero.

    Every idle period still costs the instance's cooldown and its next start.
    """
    spells = [spell for spell in load.idle if spell > COOLDOWN_S]
    a_month = len(spells) / load.seconds * MONTH_S
    saved = sum(spell - COOLDOWN_S - wanted.cold_start for spell in spells) / load.seconds * MONTH_S
    late = backlog = 0.0
    if spells and row.planned:
        queue = RecordedQueue(load.arrivals, row.time.planned)
        starts = np.where(load.idle_before > COOLDOWN_S, wanted.cold_start, 0.0)
        late, backlog = queue.late_after_starts(np.array(row.planned.replicas), starts, wanted.p99)
    pays_from = (a_month or DAYS) * (COOLDOWN_S + wanted.cold_start) / MONTH_S
    return ScaleToZero(pays_from, load.idle_share, saved / HOUR_S * row.host.per_hour, a_month, late, backlog)


def saved_by_optimising(rows: Sequence[ServingOption], best: ServingOption) -> float | None:
    """Return the monthly dollars saved over the cheapest FP32 row.

    None if FP32 is the best or cannot keep the p99.
    """
    if best.variant == FP32:
        return None
    plain = recommended_option([row for row in rows if row.variant == FP32])
    return plain.dollars - best.dollars if plain else None


def p99_at_random(row: ServingOption, load: RequestLoad) -> float:
    """Return the p99 of the minute with the longest if requests go to random replicas."""
    assert row.planned
    replicas = np.array(row.planned.replicas)
    one_of_them = load.arrivals.times(1 / replicas[load.arrivals.hours])
    return RecordedQueue(one_of_them, row.time.planned).p99(np.ones_like(replicas))


def request_rate_limit(row: ServingOption, load: RequestLoad, wanted: ServingRequirements) -> float:
    """Return the requests per second in the busiest minute up to which the busiest hour's instances keep the p99."""
    assert row.planned
    servers, service = max(row.planned.instances) * row.host.holds, row.time.planned

    def kept(factor: float) -> bool:
        busy = factor * max(load.rates) * service.mean <= MOST_BUSY * servers
        queue = RecordedQueue(load.arrivals.times(factor), service)
        return busy and bool(queue.hours_kept(np.full(len(HOURS), servers), wanted.p99).all())

    low, high = 1.0, 2.0
    while kept(high):
        low, high = high, 2 * high
    while high - low > NEAR * low:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low * max(load.rates)
