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
from typing import Any

from slipstream.shared.errors import UserError
from slipstream.shared.profiles.placement import TYPE_LABEL, Placement
from slipstream.shared.toml_file import BadToml, read_toml

FILE = Path(__file__).with_name("prices.toml")
#: GKE's accelerator label, used in addition to ``TYPE_LABEL`` if the placement's node selector has it.
ACCELERATOR_LABEL = "cloud.google.com/gke-accelerator"
TABLES = ("sources", "instances", "accelerators", "cpu_instances")
OLD_DAYS = 90
#: Bounds that reject typing errors: GPUs or cores of an instance, and dollars per hour.
MOST_PARTS = 100_000
LEAST_DOLLARS, MOST_DOLLARS = Decimal("1e-6"), Decimal("1e6")


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
    """Return the price that the profile sets, if any."""
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
    try:
        data = read_toml(path, parse_float=Decimal)
    except (OSError, BadToml) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if extra := sorted(set(data) - set(TABLES)):
        raise UserError(f"{path}: {extra[0]}: unknown table; expected {', '.join(TABLES)}")
    sources, instances, accelerators, cpus = (table(path, data, name) for name in TABLES)
    read = {name: instance(f"{path}: {name}", name, instances[name], sources) for name in instances}
    read_cpus = {name: cpu_instance(f"{path}: {name}", name, cpus[name], sources) for name in cpus}
    for accelerator, name in accelerators.items():
        if not isinstance(name, str) or name not in read:
            raise UserError(f"{path}: accelerators.{accelerator}: there is no instance {name}")
    return PriceList(read, accelerators, read_cpus)


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


def table(path: Path, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name, {})
    if not isinstance(found, dict):
        raise UserError(f"{path}: {name}: expected a table, such as [{name}]")
    return found


def instance(where: str, name: str, entry: object, sources: Mapping[str, Any]) -> Instance:
    """Validate a file entry and return its instance."""
    required, optional = {"gpus", "region", "on_demand", "source"}, {"spot", "gpu"}
    if not isinstance(entry, dict) or not required <= entry.keys() <= required | optional:
        raise UserError(f"{where}: expected {', '.join(sorted(required))} and, if known, spot and gpu")
    gpus = whole(f"{where}: gpus", entry["gpus"])
    on_demand, source, dated = priced(where, entry, sources)
    spot, spread = None, 0.0
    if "spot" in entry:
        low, high = spot_range(f"{where}: spot", entry["spot"])
        if high > on_demand:
            raise UserError(f"{where}: spot: {high} is above on_demand, {on_demand}; expected at most that")
        spot, spread = (low + high) / 2, float((high - low) / (high + low))
    region, gpu = (words(f"{where}: {key}", entry.get(key, "")) for key in ("region", "gpu"))
    return Instance(name, gpus, region, on_demand, spot, source, dated, gpu, spread)


def cpu_instance(where: str, name: str, entry: object, sources: Mapping[str, Any]) -> CpuInstance:
    """Validate a file entry and return its CPU instance."""
    required = {"cpu", "cores", "region", "on_demand", "source"}
    if not isinstance(entry, dict) or entry.keys() != required:
        raise UserError(f"{where}: expected {', '.join(sorted(required))}")
    if not isinstance(entry["cpu"], str) or not entry["cpu"]:
        raise UserError(
            f"{where}: cpu: {entry['cpu']}; expected a word of the CPU name that Linux reports, such as 8481C"
        )
    cores, region = whole(f"{where}: cores", entry["cores"]), words(f"{where}: region", entry["region"])
    return CpuInstance(name, entry["cpu"], cores, region, *priced(where, entry, sources))


def priced(where: str, entry: Mapping[str, Any], sources: Mapping[str, Any]) -> tuple[Decimal, str, str]:
    """Return on-demand dollars per hour, and web address and date of the source."""
    on_demand = dollars(f"{where}: on_demand", entry["on_demand"])
    source = sources.get(words(f"{where}: source", entry["source"]))
    if not isinstance(source, dict) or set(source) != {"address", "date"}:
        raise UserError(f"{where}: source: {entry['source']}; expected a table of sources with address and date")
    if type(source["date"]) is not date or not str(source["address"]).startswith("https://"):
        raise UserError(f"{where}: source: {entry['source']}; expected a date and an address with https://")
    return on_demand, source["address"], source["date"].isoformat()


def spot_range(where: str, value: object) -> tuple[Decimal, Decimal]:
    """Return lowest and highest spot price of an entry, equal for a single price."""
    if not isinstance(value, list):
        return dollars(where, value), dollars(where, value)
    if len(value) != 2:
        raise UserError(f"{where}: {len(value)} prices; expected one, or the lowest and the highest")
    low, high = (dollars(where, each) for each in value)
    if low > high:
        raise UserError(f"{where}: {low} is above {high}; expected the lowest price first")
    return low, high


def words(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {value}; expected text in quotes")
    return value


def whole(where: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MOST_PARTS:
        raise UserError(f"{where}: {value}; expected a whole number from 1 to {MOST_PARTS:,}")
    return value


def dollars(where: str, value: object) -> Decimal:
    """Return a positive price.

    Raises ``UserError`` for implausible values.
    """
    price = Decimal(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else Decimal(0)
    if not price.is_finite() or price <= 0:
        raise UserError(f"{where}: {value}; expected dollars per hour above 0; leave the entry out if it is not known")
    if not LEAST_DOLLARS <= price <= MOST_DOLLARS:
        raise UserError(f"{where}: {value}; expected dollars per hour from {LEAST_DOLLARS:f} to {MOST_DOLLARS:,f}")
    return price
