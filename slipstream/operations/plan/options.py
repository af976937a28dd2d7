"""Options: every profile on all instances with its GPU, and other instances as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from slipstream.operations.plan.estimate import GpuModel, known_gpus
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import Profile
from slipstream.shared.telemetry.prices import (
    ACCELERATOR_LABEL,
    TYPE_LABEL,
    Instance,
    PodPrice,
    PriceList,
    profile_price,
)


@dataclass(frozen=True)
class InstanceOption:
    """Pods of a profile on an instance type, or one whole instance (``profile`` is "")."""

    profile: str
    #: Name of a built-in profile, or absolute path of a file.
    extends: str
    placement: Placement | None
    instance: Instance
    gpu: GpuModel
    pods: int
    #: GPUs per pod.
    gpus: int
    price: PodPrice

    @property
    def processes(self) -> int:
        return self.pods * self.gpus

    @property
    def notices(self) -> bool:
        return self.placement is not None and self.placement.notices != "none"

    def per_hour(self, *, spot: bool) -> float | None:
        """Return the dollars per hour of all pods; None without a price."""
        price = self.price.paid(spot)
        return None if price is None else float(Decimal(self.pods) * price)


def instance_options(profiles: Sequence[Profile], prices: PriceList) -> list[InstanceOption]:
    """Return the options of the profiles, then whole instances that no profile uses."""
    found = [option for profile in profiles for option in of_profile(profile, prices)]
    used = {option.instance.name for option in found}
    whole = [
        InstanceOption("", "", None, each, known_gpus()[each.gpu], 1, each.gpus, each.part(each.gpus))
        for each in prices.instances.values()
        if each.gpu in known_gpus() and each.name not in used
    ]
    return [*found, *whole]


def left_out(profiles: Sequence[Profile], prices: PriceList) -> Iterator[str]:
    """Yield a line per profile or instance that is not planned, with the reason."""
    for profile in profiles:
        if not list(of_profile(profile, prices)):
            yield f"profile {profile.name}: {why_not(profile.asked('train'))}"
    if unknown := [name for name, each in prices.instances.items() if each.gpu not in known_gpus()]:
        yield f"{', '.join(unknown)}: no GPU that is known, of {', '.join(known_gpus())}"


def why_not(placement: Placement) -> str:
    if not int(placement.gpu):
        return "has no GPU"
    return "has part of a GPU" if placement.mig or placement.shared_gpu else "no price of its GPUs is known"


def of_profile(profile: Profile, prices: PriceList) -> Iterator[InstanceOption]:
    """Yield a profile's training on every instance type with its GPU.

    Raises ``UserError`` if the profile names an instance type without a price.
    """
    placement = profile.asked("train")
    count = int(placement.gpu)
    if not count or placement.mig or placement.shared_gpu:
        return
    named = placement.node_selector.get(TYPE_LABEL, "")
    if named and named not in prices.instances:
        raise UserError(
            f"profile {profile.name}: {TYPE_LABEL} {named}: no such instance among the prices; expected one of "
            f"{', '.join(prices.instances)}, or a file with its price: --prices"
        )
    accelerator = placement.accelerator or placement.node_selector.get(ACCELERATOR_LABEL, "")
    like = prices.instances.get(named or prices.accelerators.get(accelerator, ""))
    if like is None or like.gpu not in known_gpus():
        return
    for instance in [like] if named else prices.instances.values():
        if instance.gpu == like.gpu and instance.gpus >= count:
            price = profile_price(placement) or instance.part(count)
            gpu, extends = known_gpus()[like.gpu], profile.file or profile.name
            yield InstanceOption(profile.name, extends, placement, instance, gpu, placement.nodes, count, price)
