"""A pod's price from its profile, node type or accelerator, or none; invalid prices are refused."""

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from slipstream.flyte.metadata import SPOT
from slipstream.flyte.watching.telemetry import prices_of, spot
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import load_profile, profile_names
from slipstream.shared.telemetry.node import NodeFacts
from slipstream.shared.telemetry.prices import FILE, CpuInstance, Instance, PodPrice, pod_price, read_prices
from tests.support.wording import refuses

EIGHT = Placement(gpu="8", processes=8, accelerator="nvidia-a100-80gb")
GOOD = """
[sources.list]
date = 2026-11-01
address = "https://example.org/prices"
[accelerators]
nvidia-l4 = "four"
[instances.four]
gpus = 4
region = "here"
on_demand = 4.004
spot = 1.6
source = "list"
[cpu_instances.two]
cpu = "8481C"
cores = 2
region = "here"
on_demand = 0.17
source = "list"
"""


def price(placement: Placement, instance_type: str = "", gpus: int | None = None) -> PodPrice:
    found = pod_price(placement, instance_type, gpus)
    assert found is not None
    return found


def test_the_type_of_the_node_says_it_before_the_accelerator() -> None:
    by_type = price(EIGHT, "p4de.24xlarge")
    assert by_type.on_demand == Decimal("27.44705") and by_type.spot is None
    assert by_type.source.startswith("https://") and date.fromisoformat(by_type.dated)
    by_accelerator = price(EIGHT, "an unknown type")
    assert by_accelerator == price(EIGHT)
    assert by_accelerator.on_demand != by_type.on_demand and "a2-ultragpu-8g" in by_accelerator.of


def test_a_pod_pays_for_its_part_of_a_node() -> None:
    quarter = price(replace(EIGHT, gpu="2", processes=2), "p5en.48xlarge")
    assert quarter.on_demand == Decimal("63.296") / 4 and quarter.spot == Decimal("27.1988") / 4
    assert quarter.of == "2 GPUs of p5en.48xlarge (8 GPUs) in us-east-1"
    assert quarter.paid(spot=True) == quarter.spot and quarter.paid(spot=False) == quarter.on_demand


def test_a_machine_without_a_placement_for_gpus_has_all_of_its_own() -> None:
    assert pod_price(Placement(), "p5.48xlarge") is None
    assert price(Placement(), "p5.48xlarge", gpus=8).on_demand == Decimal("55.04")


def test_labels_that_a_placement_selects_nodes_by_say_what_they_are() -> None:
    assert "p5.48xlarge" in price(load_profile("h100-efa-spot").asked("train")).of
    assert "g2-standard-48" in price(load_profile("l4-spot").asked("train")).of


@pytest.mark.parametrize("placement", [Placement(gpu="1", mig="1g.5gb"), Placement(gpu="1", shared_gpu="mps")])
def test_part_of_a_gpu_has_the_profiles_price_or_none(placement: Placement) -> None:
    assert pod_price(placement, "a2-highgpu-1g") is None
    assert price(replace(placement, price_per_hour=0.5), "a2-highgpu-1g").on_demand == Decimal("0.5")


def test_what_the_profile_says_counts_before_all_else() -> None:
    own = price(replace(EIGHT, price_per_hour=20.1, spot_price_per_hour=8), "p4de.24xlarge")
    assert (own.on_demand, own.spot, own.source) == (Decimal("20.1"), Decimal("8.0"), "")
    assert price(replace(EIGHT, price_per_hour=20.1), "p5en.48xlarge").spot is None
    assert price(replace(EIGHT, spot_price_per_hour=8)).on_demand is None


@pytest.mark.parametrize(
    "given",
    [
        {"price_per_hour": -1.0},
        {"spot_price_per_hour": -0.5},
        {"price_per_hour": 2, "spot_price_per_hour": 3.5},
        {"price_per_hour": float("nan")},
    ],
)
def test_a_profile_with_a_price_that_cannot_be_is_refused(given: dict[str, float]) -> None:
    with refuses(UserError) as error:
        Placement.from_dict(given)
    assert "\n" not in error.value.message


def test_a_spot_price_alone_is_no_contradiction() -> None:
    assert Placement.from_dict({"spot_price_per_hour": 3}).spot_price_per_hour == 3


def test_every_price_that_comes_with_the_project_has_its_source_and_date() -> None:
    prices = read_prices(FILE)
    assert len(prices.instances) >= 25
    assert len(prices.cpu_instances) >= 4
    every: list[Instance | CpuInstance] = [*prices.instances.values(), *prices.cpu_instances.values()]
    for instance in every:
        assert instance.source.startswith("https://") and date.fromisoformat(instance.dated) >= date(2025, 1, 1)
    assert {type(pod_price(load_profile(name).asked("train"))) for name in profile_names()} == {PodPrice, type(None)}


def test_a_range_of_spot_prices_has_a_middle_and_a_spread(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD.replace("spot = 1.6", "spot = [1.2, 2.0]"))
    whole = read_prices(path).instances["four"].part(4)
    assert whole.spot == Decimal("1.6") and whole.spot_spread == 0.25
    half = read_prices(path).instances["four"].part(2)
    assert half.spot == Decimal("0.8") and half.spot_spread == 0.25


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("on_demand = 4.004", "on_demand = 0"),
        ("on_demand = 4.004", "on_demand = -4"),
        ("on_demand = 4.004", 'on_demand = "4"'),
        ("on_demand = 4.004", "on_demand = nan"),
        ("on_demand = 4.004", ""),
        ("spot = 1.6", "spot = 0.0"),
        ("spot = 1.6", "spot = 4.1"),
        ("spot = 1.6", "spot = [1.2, 4.1]"),
        ("spot = 1.6", "spot = [1.6, 1.2]"),
        ("spot = 1.6", "spot = [1.6]"),
        ("spot = 1.6", "spot = [0, 1.6]"),
        ("gpus = 4", "gpus = 0"),
        ("gpus = 4", "gpus = 4\nnote = 1"),
        ('cpu = "8481C"', "cpu = 8481"),
        ('cpu = "8481C"', ""),
        ("cores = 2", "cores = 0"),
        ("on_demand = 0.17", "on_demand = -1"),
        ('source = "list"', 'source = "hearsay"'),
        ("date = 2026-11-01", 'date = "then"'),
        ("https://", "ftp://"),
        ('"four"', '"five"'),
        ("[accelerators]", "[accelerator]"),
        ("[accelerators]", "[accelerators"),
    ],
)
def test_a_file_with_a_price_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    assert read_prices(path).instances["four"].spot == Decimal("1.6")
    path.write_text(GOOD.replace(old, new))
    with refuses(UserError) as error:
        read_prices(path)
    assert str(path) in error.value.message


@pytest.mark.parametrize(("chosen", "dollars"), [("true", 4.0), ("false", 10.0), (None, 4.0)])
def test_an_execution_on_demand_costs_the_on_demand_price(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, dollars: float
) -> None:
    """Whatever the profile asks for; without propeller's label the profile decides."""
    monkeypatch.delenv(SPOT, raising=False)
    if chosen:
        monkeypatch.setenv(SPOT, chosen)
    placement = Placement(interruptible=True, price_per_hour=10, spot_price_per_hour=4)
    facts = NodeFacts(0.0, "pod", "", "", spot(placement), False)
    assert prices_of(placement, facts)["paid"] == dollars
