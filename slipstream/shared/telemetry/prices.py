"""Hourly price of a pod, from the profile, the node's instance type or the accelerator.

``prices.toml`` has prices of whole instances, with source and date. A pod pays for its fraction of the instance's GPUs.
Without a known price only hours are reported. For parts of GPUs (MIG, shared) and pods without GPUs, only the profile
has prices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from slipstream.shared.profiles.placement import TYPE_LABEL, Placement
from slipstream.shared.settings import Settings, one_of, settings, wrong

FILE = Path(__file__).with_name("prices.toml")
#: GKE's accelerator label, used in addition to ``TYPE_LABEL`` if the placement's node selector has it.
ACCELERATOR_LABEL = "cloud.google.com/gke-accelerator"
OLD_DAYS = 90
#: Bounds that reject typing errors: GPUs or cores of an instance, and dollars per hour.
Parts = Annotated[int, Field(ge=1, le=100_000)]
Dollars = Annotated[float, Field(ge=1e-6, le=1e6)]


@settings
class PriceSource(Settings):
    address: str
    date: str


@settings
class CpuEntry(Settings):
    """Entry of a CPU instance; ``source`` names a table of sources."""

    cpu: Annotated[str, Field(min_length=1)]
    cores: Parts
    region: str
    on_demand: Dollars
    source: str
    cpus: Annotated[int, Field(ge=0, le=100_000)] = 0
    memory_gib: Annotated[float, Field(ge=0, le=1e6)] = 0.0


@settings
class GpuEntry(Settings):
    """Entry of an instance with GPUs; ``spot`` is a price, or the lowest and the highest."""

    gpus: Parts
    region: str
    on_demand: Dollars
    source: str
    spot: Annotated[list[Dollars], BeforeValidator(lambda price: price if isinstance(price, list) else [price] * 2)] = (
        field(default_factory=list)
    )
    gpu: str = ""


@settings
class PriceFile(Settings):
    """Tables of a price file."""

    sources: dict[str, PriceSource] = field(default_factory=dict)
    instances: dict[str, GpuEntry] = field(default_factory=dict)
    accelerators: dict[str, str] = field(default_factory=dict)
    cpu_instances: dict[str, CpuEntry] = field(default_factory=dict)

    def check(self) -> None:
        for name, source in self.sources.items():
            if not source.address.startswith("https://"):
                raise wrong(f"sources.{name}.address", source.address, "an address with https://")
            if not is_date(source.date):
                raise wrong(f"sources.{name}.date", source.date, "a date")
        for place, entries in (("instances", self.instances), ("cpu_instances", self.cpu_instances)):
            for name, entry in entries.items():
                if entry.source not in self.sources:
                    raise wrong(f"{place}.{name}.source", entry.source, one_of(self.sources))
        for name, its in self.instances.items():
            if its.spot and not (len(its.spot) == 2 and its.spot[0] <= its.spot[1] <= its.on_demand):
                expected = "a price of at most on_demand, or the lowest and the highest"
                raise wrong(f"instances.{name}.spot", its.spot, expected)
        for accelerator, name in self.accelerators.items():
            if name not in self.instances:
                raise wrong(f"accelerators.{accelerator}", name, "the name of an instance")


@dataclass(frozen=True)
class PodPrice:
    """Dollars per hour of one pod; None if unknown."""

    on_demand: Decimal | None
    spot: Decimal | None
    #: The priced capacity, such as "2 GPUs of p5.48xlarge (8 GPUs) in us-east-1".
    of: str
    #: Web address and date of the price; both empty for a price of the profile.
    source: str = ""
    dated: str = ""
    #: Half the range of spot prices, as a fraction of ``spot``.
    spot_spread: float = 0.0

    def paid(self, spot: bool) -> Decimal | None:
        """Return the spot or on-demand price."""
        return self.spot if spot else self.on_demand


@dataclass(frozen=True)
class Instance:
    """Instance type with its GPUs and dollars per hour; ``spot`` is the middle of its price range."""

    name: str
    gpus: int
    region: str
    on_demand: Decimal
    spot: Decimal | None
    source: str
    dated: str
    #: Name of its GPU in ``slipstream/operations/plan/gpus.toml``; "" if not stated.
    gpu: str = ""
    #: See :class:`PodPrice`.
    spot_spread: float = 0.0

    def part(self, gpus: int) -> PodPrice:
        """Return the price of a pod with ``gpus`` of this instance's GPUs."""
        share = Decimal(gpus) / self.gpus
        spot = None if self.spot is None else self.spot * share
        of = f"{gpus} GPUs of {self.name} ({self.gpus} GPUs) in {self.region}"
        return PodPrice(self.on_demand * share, spot, of, self.source, self.dated, self.spot_spread)


@dataclass(frozen=True)
class CpuInstance:
    """Instance type without GPUs, for serving.

    ``cpu`` is a word of the CPU name in Linux; ``cores`` are physical cores; ``on_demand`` is dollars per hour.
    """

    name: str
    cpu: str
    cores: int
    region: str
    on_demand: Decimal
    source: str
    dated: str
    #: CPUs as Kubernetes counts them, and memory; 0 if unknown.
    cpus: int = 0
    memory_gib: float = 0.0


@dataclass(frozen=True)
class PriceList:
    """Instances by name, and the representative instance of every accelerator."""

    instances: Mapping[str, Instance]
    accelerators: Mapping[str, str]
    cpu_instances: Mapping[str, CpuInstance] = field(default_factory=dict)


def pod_price(
    placement: Placement, instance_type: str = "", gpus: int | None = None, prices: PriceList | None = None
) -> PodPrice | None:
    """Return the hourly price of a pod of the placement; None if unknown.

    ``instance_type`` comes from the node's metadata. ``gpus`` overrides the placement's number of GPUs, such as all of
    one machine.
    """
    if own := profile_price(placement):
        return own
    gpus = int(placement.gpu) if gpus is None else gpus
    if not gpus or placement.mig or placement.shared_gpu:
        return None
    prices = prices or built_in_prices()
    accelerator = placement.accelerator or placement.node_selector.get(ACCELERATOR_LABEL, "")
    names = (
        instance_type or placement.node_selector.get(TYPE_LABEL, ""),
        prices.accelerators.get(accelerator, ""),
    )
    return next((prices.instances[name].part(gpus) for name in names if name in prices.instances), None)


def profile_price(placement: Placement) -> PodPrice | None:
    given = [placement.price_per_hour, placement.spot_price_per_hour]
    if not any(given):
        return None
    on_demand, spot = (Decimal(str(price)) if price else None for price in given)
    return PodPrice(on_demand, spot, "a pod, by the profile")


@cache
def built_in_prices() -> PriceList:
    return read_prices(FILE)


def read_prices(path: Path) -> PriceList:
    """Read a price file.

    Raises ``UserError`` naming the invalid entry.
    """
    file = PriceFile.from_toml(path)
    return PriceList(
        {name: instance(name, entry, file.sources[entry.source]) for name, entry in file.instances.items()},
        file.accelerators,
        {name: cpu_instance(name, entry, file.sources[entry.source]) for name, entry in file.cpu_instances.items()},
    )


def merge_prices(below: PriceList, above: PriceList) -> PriceList:
    """Return ``below`` updated with ``above``."""
    return PriceList(
        {**below.instances, **above.instances},
        {**below.accelerators, **above.accelerators},
        {**below.cpu_instances, **above.cpu_instances},
    )


def old_prices(dated: Mapping[str, str], today: date | None = None) -> Iterator[str]:
    """Yield one line per date older than ``OLD_DAYS``; ``dated`` has ISO dates by name."""
    today = today or datetime.now(UTC).date()
    past = {name: on for name, on in dated.items() if (today - date.fromisoformat(on)).days > OLD_DAYS}
    for on in sorted(set(past.values())):
        yield f"prices of {on} are older than {OLD_DAYS} days: {', '.join(n for n, d in past.items() if d == on)}"


def instance(name: str, entry: GpuEntry, source: PriceSource) -> Instance:
    spot, spread = None, 0.0
    if entry.spot:
        low, high = map(exact, entry.spot)
        spot, spread = (low + high) / 2, float((high - low) / (high + low))
    on_demand, dated = exact(entry.on_demand), source.date
    return Instance(name, entry.gpus, entry.region, on_demand, spot, source.address, dated, entry.gpu, spread)


def cpu_instance(name: str, entry: CpuEntry, source: PriceSource) -> CpuInstance:
    on_demand = exact(entry.on_demand)
    size = (entry.cpus, entry.memory_gib)
    return CpuInstance(name, entry.cpu, entry.cores, entry.region, on_demand, source.address, source.date, *size)


def exact(price: float) -> Decimal:
    """Return a price in the form of its file."""
    return Decimal(str(price))


def is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False
