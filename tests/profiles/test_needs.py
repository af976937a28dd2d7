"""Total needs of a profile's stages: amounts in Kubernetes' notation, tolerated taints, clouds."""

from typing import Any

import pytest

from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.needs import at_once, format_quantity, pod_placements, profile_cloud, tolerates_taint
from slipstream.shared.profiles.placement import Placement, Toleration
from slipstream.shared.profiles.profile import load_profile, parse_profile

TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration(key="team", operator="Exists"), True),
        (Toleration(key="team", operator="Equal", value="a"), True),
        (Toleration(key="team", operator="Equal", value="b"), False),
        (Toleration(key="team", operator="Equal"), False),
        (Toleration(key="team", operator="Exists", effect="NoSchedule"), True),
        (Toleration(key="team", operator="Exists", effect="NoExecute"), False),
        (Toleration(key="teams", operator="Exists"), False),
        (Toleration(operator="Exists"), True),
        (Toleration(operator="Exists", effect="NoExecute"), False),
        (Toleration(operator="Equal"), False),
    ],
)
def test_a_taint_is_tolerated_as_kubernetes_does(toleration: Toleration, tolerated: bool) -> None:
    placement = Placement(tolerations=[toleration])
    assert tolerates_taint(placement, TAINT) is tolerated
    assert tolerates_taint(placement, {**TAINT, "effect": "PreferNoSchedule"})


def test_a_taint_without_a_value_is_tolerated_by_none() -> None:
    placement = Placement(tolerations=[Toleration(key="team", operator="Equal")])
    assert tolerates_taint(placement, {"key": "team", "effect": "NoSchedule"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cpu", "88"),
        ("cpu", "3500m"),
        ("memory", "1000Gi"),
        ("memory", "1536Mi"),
        ("nvidia.com/gpu", "16"),
        ("cpu", "0"),
    ],
)
def test_an_amount_is_written_as_it_was_read(name: str, text: str) -> None:
    assert format_quantity(name, parse_quantity(text)) == text


def test_an_amount_between_is_rounded_up() -> None:
    assert format_quantity("memory", 2**20 + 1) == "2Mi" and format_quantity("hugepages-2Mi", 3 * 2**30) == "3Gi"
    assert format_quantity("cpu", 0.0005) == "1m" and format_quantity("memory", 0) == "0"


def test_beside_a_process_group_there_is_room_for_the_largest_other_stage() -> None:
    stages = pod_placements(load_profile("a100-spot"))
    assert at_once(stages)["cpu"] == 2 * 88 + 4 * 16 and at_once(stages)["nvidia.com/gpu"] == 16
    others = {name: stages[name] for name in ("prepare", "export")}
    assert at_once(others)["cpu"] == 4 * 16
    assert at_once({name: stages[name] for name in ("train", "sweep")})["cpu"] == 2 * 88


@pytest.mark.parametrize(
    ("table", "cloud"),
    [
        ({}, ""),
        ({"notices": "gcp"}, "gcp"),
        ({"node_selector": {"node.kubernetes.io/instance-type": "p5.48xlarge"}}, "aws"),
        ({"node_selector": {"node.kubernetes.io/instance-type": "g2-standard-48"}}, "gcp"),
        ({"node_selector": {"node.kubernetes.io/instance-type": "Standard_NC24ads_A100_v4"}}, "azure"),
        ({"tolerations": [{"key": "kubernetes.azure.com/scalesetpriority"}]}, "azure"),
    ],
)
def test_a_profile_is_of_the_cloud_that_it_speaks_of(table: dict[str, Any], cloud: str) -> None:
    assert profile_cloud(parse_profile("mine", {"distributed": table})) == cloud
