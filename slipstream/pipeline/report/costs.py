"""Hours, energy and dollars of a run's stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from slipstream.shared.artifacts.results.devices import TrainingDevices
from slipstream.shared.profiles.profile import Profile, current_profile
from slipstream.shared.stages import STAGES, StageRun
from slipstream.shared.telemetry.prices import PodPrice, pod_price

TOTAL = "in all"


@dataclass(frozen=True)
class CostFigures:
    """Resources used by one stage in all its attempts, or by all stages.

    Dollars are None if no price is known.
    """

    stage: str
    pod_hours: float
    gpu_hours: float
    #: Energy of the GPUs; None if their drivers do not report it.
    watt_hours: float | None
    #: Dollars paid, dollars of lost work among them, and the on-demand price as :attr:`Cost.on_demand`.
    paid: float | None
    lost: float | None
    on_demand: float | None
    #: Pod-hours without a known price, not included in the dollars.
    unpriced_pod_hours: float
    #: Priced resource and date of the price; "" without a price.
    priced_as: str = ""


def stage_costs(
    stages: Sequence[StageRun], devices: TrainingDevices | None = None, profile: Profile | None = None
) -> list[CostFigures]:
    """Return the costs of the stages that this run executed, then their total.

    The list is empty if no stage was executed, or if neither GPUs nor prices are known.
    """
    profile = profile or current_profile()
    made = [stage for stage in stages if not stage.reused]
    prices = {stage.name: price_of(stage, profile) for stage in made}
    usages = [usage for stage in made for usage in usages_of(stage, devices, prices[stage.name], profile)]
    if not any(usage.gpus or usage.price is not None for usage in usages):
        return []
    found = compute_bill(usages)
    rows = [figures(name, cost, priced_as(prices[name])) for name, cost in found.stages.items()]
    return [*rows, figures(TOTAL, found.total)]


def price_of(stage: StageRun, profile: Profile) -> PodPrice | None:
    placement = profile.placement(pods_of(stage.name))
    gpus = int(placement.gpu) or (stage.usage.gpus if stage.usage else 0)
    return pod_price(placement, stage.usage.instance_type if stage.usage else "", gpus)


def usages_of(
    stage: StageRun, devices: TrainingDevices | None, price: PodPrice | None, profile: Profile
) -> Iterator[AttemptUsage]:
    """Yield the usage of every attempt at a stage; except for training, only the last attempt is known."""
    placement = profile.placement(pods_of(stage.name))
    on_demand, spot = (price.on_demand, price.spot) if price else (None, None)
    its = stage.usage
    gpus = int(placement.gpu) or (its.gpus if its else 0)
    if stage.name == "train" and devices:
        for attempt in devices.attempts:
            seconds = attempt.before + attempt.seconds
            if attempt is devices.attempts[-1]:
                # The agent, which ends last, has measured the whole attempt.
                seconds = max(seconds, stage.seconds)
            joules = [pod.energy_joules for pod in devices.pods if pod.attempt == attempt.number]
            known = [each for each in joules if each is not None]
            yield AttemptUsage(
                stage=stage.name,
                attempt=attempt.number,
                seconds=seconds,
                lost_seconds=min(attempt.lost, seconds),
                pods=placement.nodes,
                gpus=gpus,
                spot=placement.interruptible if attempt.spot is None else attempt.spot,
                on_demand_price=on_demand,
                spot_price=spot,
                joules=sum(known) if known else None,
            )
        return
    yield AttemptUsage(
        stage=stage.name,
        attempt=0,
        seconds=stage.seconds,
        pods=placement.nodes,
        gpus=gpus,
        spot=its.spot if its else placement.interruptible,
        on_demand_price=on_demand,
        spot_price=spot,
        joules=its.joules if its else None,
    )


def pods_of(stage: str) -> str:
    """Return the stage whose pods run ``stage``."""
    return STAGES[stage].pod_of or stage


def priced_as(price: PodPrice | None) -> str:
    return "" if price is None else f"{price.of}, {price.dated}" if price.dated else price.of


def figures(stage: str, cost: Cost, price: str = "") -> CostFigures:
    paid, lost, on_demand = (None if d is None else float(d) for d in (cost.paid, cost.lost, cost.on_demand))
    return CostFigures(
        stage=stage,
        pod_hours=cost.pod_hours,
        gpu_hours=cost.gpu_hours,
        watt_hours=cost.watt_hours,
        paid=paid,
        lost=lost,
        on_demand=on_demand,
        unpriced_pod_hours=cost.unpriced_pod_hours,
        priced_as=price,
    )


# Dollars are computed as exact fractions and rounded only in running sums: over all useful work, then all lost work,
# then the savings of spot capacity, then on-demand dollars without a known payment, in row order. An amount is the
# difference of the rounded sums after and before it. So the total is correctly rounded, and every amount is off by less
# than a cent.
HOUR = 3600


@dataclass(frozen=True)
class AttemptUsage:
    """Resource usage of one attempt at a stage.

    Prices are dollars per hour of one pod, None if unknown.
    """

    stage: str
    #: Number of the attempt, from 0.
    attempt: int
    #: Seconds for which its pods ran, and how many of these seconds were lost work.
    seconds: float
    lost_seconds: float = 0.0
    pods: int = 1
    #: GPUs per pod.
    gpus: int = 0
    #: True if it ran on spot capacity.
    spot: bool = False
    on_demand_price: Decimal | None = None
    spot_price: Decimal | None = None
    #: Joules of all its GPUs; None if no driver counts them.
    joules: float | None = None

    def __post_init__(self) -> None:
        amounts = (self.seconds, self.lost_seconds, self.pods, self.gpus, self.joules or 0)
        prices = [price for price in (self.on_demand_price, self.spot_price) if price is not None]
        if not all(math.isfinite(amount) and amount >= 0 for amount in (*amounts, *prices)):
            raise ValueError(f"{self}: expected finite amounts of at least 0")

    @property
    def price(self) -> Decimal | None:
        """Price of the capacity that was used: spot or on-demand."""
        return self.spot_price if self.spot else self.on_demand_price


@dataclass(frozen=True)
class Cost:
    """Cost of one or several attempts.

    Dollars are rounded to cents; None if no price is known.
    """

    pod_hours: float
    gpu_hours: float
    watt_hours: float | None
    #: Dollars paid (including lost work), and the part paid for lost work.
    paid: Decimal | None
    lost: Decimal | None
    #: Dollars for the same hours at on-demand prices; for all hours if ``paid`` is None.
    on_demand: Decimal | None
    #: Pod-hours without a known price; the dollars exclude them.
    unpriced_pod_hours: float = 0.0


@dataclass(frozen=True)
class AttemptCost:
    """Cost of one attempt."""

    stage: str
    attempt: int
    cost: Cost


@dataclass(frozen=True)
class Bill:
    """Costs per attempt, per stage and in total; rows are grouped by stage."""

    rows: tuple[AttemptCost, ...]
    stages: dict[str, Cost]
    total: Cost


def compute_bill(usages: Iterable[AttemptUsage]) -> Bill:
    """Return the costs per attempt, per stage and in total."""
    used = list(usages)
    order = list(dict.fromkeys(usage.stage for usage in used))
    used.sort(key=lambda usage: order.index(usage.stage))
    rows = tuple(AttemptCost(usage.stage, usage.attempt, cost) for usage, cost in zip(used, costs(used), strict=True))
    stages = {stage: total_cost([row.cost for row in rows if row.stage == stage]) for stage in order}
    return Bill(rows, stages, total_cost([row.cost for row in rows]))


def costs(used: Sequence[AttemptUsage]) -> Iterator[Cost]:
    """Yield the cost of every attempt, rounded by running sums."""
    cents = in_cents([amount for part in zip(*map(parts, used), strict=True) for amount in part])
    for number, usage in enumerate(used):
        useful_paid, lost_paid, less, unpaid = cents[number :: len(used)]
        pod_hours = usage.seconds * usage.pods / HOUR
        paid = on_demand = None
        if usage.price is not None:
            paid = useful_paid + lost_paid
        if usage.on_demand_price is not None:
            on_demand = useful_paid + lost_paid + less + unpaid
        yield Cost(
            pod_hours,
            pod_hours * usage.gpus,
            None if usage.joules is None else usage.joules / HOUR,
            paid,
            None if paid is None else lost_paid,
            on_demand,
            pod_hours if paid is None else 0.0,
        )


def parts(usage: AttemptUsage) -> tuple[Fraction, ...]:
    """Return exact dollars: useful and lost work, saved against on-demand, and on-demand of an unknown price."""
    hours = Fraction(usage.seconds) * usage.pods / HOUR
    lost_hours = min(Fraction(usage.lost_seconds) * usage.pods / HOUR, hours)
    if usage.price is None:
        return Fraction(0), Fraction(0), Fraction(0), hours * Fraction(usage.on_demand_price or 0)
    price = Fraction(usage.price)
    on_demand = Fraction(usage.on_demand_price if usage.on_demand_price is not None else price)
    return (hours - lost_hours) * price, lost_hours * price, hours * (on_demand - price), Fraction(0)


def in_cents(amounts: Sequence[Fraction]) -> list[Decimal]:
    """Return differences of the running sums, rounded to cents (half a cent up)."""
    rounded, exact, before = list[Decimal](), Fraction(0), 0
    for amount in amounts:
        exact += amount
        after = math.floor(exact * 100 + Fraction(1, 2))
        rounded.append(Decimal(after - before).scaleb(-2))
        before = after
    return rounded


def total_cost(rows: Sequence[Cost]) -> Cost:
    """Return the sum of every figure over the rows that have it."""
    # Of the rows that are paid for, to be compared; None if one of these has no on-demand price.
    priced = [row.on_demand for row in rows if row.paid is not None]
    return Cost(
        sum(row.pod_hours for row in rows),
        sum(row.gpu_hours for row in rows),
        known_sum([row.watt_hours for row in rows]),
        known_dollars([row.paid for row in rows]),
        known_dollars([row.lost for row in rows]),
        None if None in priced else known_dollars(priced or [row.on_demand for row in rows]),
        sum(row.unpriced_pod_hours for row in rows),
    )


def known_sum(amounts: Sequence[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def known_dollars(amounts: Sequence[Decimal | None]) -> Decimal | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known, Decimal("0.00")) if known else None
