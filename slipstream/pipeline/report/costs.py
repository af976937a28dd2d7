"""Hours, energy and dollars of a run's stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.shared.artifacts.results.devices import TrainingDevices
from slipstream.shared.profiles.profile import Profile, current_profile
from slipstream.shared.stages import STAGES, StageRun
from slipstream.shared.telemetry.cost import AttemptUsage, Cost, compute_bill
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
    #: Dollars paid, dollars of lost work among them, and the on-demand price of the same hours.
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

    The list is empty if no stage was executed, or if neither GPUs nor prices are known. The attempts of a training come
    from ``devices``.
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
            joules = [pod.energy_joules for pod in devices.pods if pod.attempt == attempt.number]
            known = [each for each in joules if each is not None]
            yield AttemptUsage(
                stage=stage.name,
                attempt=attempt.number,
                seconds=attempt.seconds,
                lost_seconds=min(attempt.lost, attempt.seconds),
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
