"""Node pools follow from the profile: pods tolerate them, and their machines have the requested resources."""

from email import message_from_string

import pytest
import yaml

from slipstream.operations.manifests.build import build_manifests
from slipstream.operations.manifests.site import profile_site
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.needs import pod_placements, tolerates_taint
from slipstream.shared.profiles.placement import TYPE_LABEL
from slipstream.shared.profiles.profile import load_profile, parse_profile
from tests.support.written_manifests import GPUS, named, objects, of_kind, requirement, site, trees

SCRIPT_AND_SETTINGS = ["text/x-shellscript", "application/node.eks.aws"]
BOTH = ("spot", "on-demand")


@pytest.mark.parametrize("profile", ["a100-mig", "a100-spot", "h100-efa-spot", "t4-shared"])
def test_every_pod_finds_a_pool_that_it_tolerates(profile: str) -> None:
    pools = [tree for tree in objects(profile) if tree["kind"] == "NodePool"]
    for stage, placement in pod_placements(load_profile(profile)).items():
        kind = "gpu" if int(placement.gpu) else "cpu"
        fit = [
            pool["metadata"]["name"]
            for pool in pools
            if all(tolerates_taint(placement, taint) for taint in pool["spec"]["template"]["spec"].get("taints", []))
        ]
        assert f"slipstream-{kind}-on-demand" in fit, stage
        assert (f"slipstream-{kind}-spot" in fit) is placement.interruptible, stage


def test_pods_of_others_stay_off_the_nodes_of_gpus_and_of_spot() -> None:
    taints = {
        tree["metadata"]["name"]: [each["key"] for each in tree["spec"]["template"]["spec"].get("taints", [])]
        for tree in objects("a100-spot")
        if tree["kind"] == "NodePool"
    }
    assert taints == {
        "slipstream-gpu-spot": ["nvidia.com/gpu", "slipstream/spot"],
        "slipstream-gpu-on-demand": ["nvidia.com/gpu"],
        "slipstream-cpu-spot": ["slipstream/spot"],
        "slipstream-cpu-on-demand": [],
    }


def test_instance_types_are_those_of_the_selector_or_the_accelerator() -> None:
    key = "node.kubernetes.io/instance-type"
    assert requirement(named("h100-efa-spot", "NodePool", "slipstream-gpu-spot"), key) == ["p5.48xlarge"]
    assert requirement(named("a100-spot", "NodePool", "slipstream-gpu-spot"), key) == ["p4de.24xlarge"]
    assert requirement(named("a100-mig", "NodePool", "slipstream-gpu-on-demand"), key) == ["p4d.24xlarge"]
    pool = named("a100-spot", "NodePool", "slipstream-gpu-spot")
    assert pool["spec"]["template"]["metadata"]["labels"] == {"k8s.amazonaws.com/accelerator": "nvidia-a100-80gb"}
    (l4,) = (pool for pool in of_kind(site(accelerator="nvidia-l4"), "NodePool") if "gpu" in pool["metadata"]["name"])
    assert requirement(l4, key) == ["g6.48xlarge"]


def test_labels_that_pods_select_by_are_on_the_nodes_or_required_of_them() -> None:
    selector = {"team": "vision", "topology.kubernetes.io/zone": "us-east-1a"}
    for pool in of_kind(site(node_selector=selector), "NodePool"):
        if "gpu" in pool["metadata"]["name"]:
            assert pool["spec"]["template"]["metadata"]["labels"]["team"] == "vision"
            assert requirement(pool, "topology.kubernetes.io/zone") == ["us-east-1a"]


def test_a_node_that_is_busy_stays_and_a_drained_one_leaves_pods_their_time() -> None:
    pools = {tree["metadata"]["name"]: tree["spec"] for tree in objects("a100-spot") if tree["kind"] == "NodePool"}
    assert len(pools) == 4
    for spec in pools.values():
        assert spec["disruption"]["consolidationPolicy"] == "WhenEmpty"
        assert {"nodes": "0", "reasons": ["Drifted", "Underutilized"]} in spec["disruption"]["budgets"]
        assert spec["template"]["spec"]["expireAfter"] == "Never"
    grace = {name: spec["template"]["spec"]["terminationGracePeriod"] for name, spec in pools.items()}
    train = pod_placements(load_profile("a100-spot"))["train"]
    assert grace["slipstream-gpu-spot"] == "120s" and grace["slipstream-gpu-on-demand"] == f"{train.timeout_minutes}m"


@pytest.mark.parametrize("profile", ["a100-mig", "h100-efa-spot", "t4-shared"])
def test_nodes_for_what_karpenter_does_not_count_are_asked_for_and_none_is_bought_unasked(profile: str) -> None:
    for pool in (tree["spec"] for tree in objects(profile) if tree["kind"] == "NodePool"):
        if "replicas" in pool:
            assert pool["replicas"] == 0 and set(pool["limits"]) == {"nodes"} and "weight" not in pool
    assert "replicas" in named(profile, "NodePool", "slipstream-gpu-on-demand")["spec"]
    assert "replicas" not in named(profile, "NodePool", "slipstream-cpu-on-demand")["spec"]


def test_spot_comes_first_where_a_pod_may_use_both() -> None:
    weights = {name: named("a100-spot", "NodePool", f"slipstream-gpu-{name}")["spec"]["weight"] for name in BOTH}
    assert weights["spot"] > weights["on-demand"]


@pytest.mark.parametrize(
    ("selector", "capacities"),
    [
        ({}, ["spot", "on-demand"]),
        ({"karpenter.sh/capacity-type": "spot"}, ["spot"]),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, ["spot"]),
        ({"karpenter.sh/capacity-type": "on-demand"}, ["on-demand"]),
    ],
)
def test_what_selects_by_a_capacity_has_no_nodes_of_the_other(selector: dict[str, str], capacities: list[str]) -> None:
    found = [
        requirement(pool, "karpenter.sh/capacity-type")
        for pool in of_kind(site(node_selector=selector, interruptible=True), "NodePool")
        if "gpu" in pool["metadata"]["name"]
    ]
    assert found == [[capacity] for capacity in capacities]


def test_pods_that_watch_for_notices_reach_the_metadata_server_and_no_others() -> None:
    for kind, hops in (("gpu", 2), ("cpu", 1)):
        options = named("a100-spot", "EC2NodeClass", f"slipstream-{kind}")["spec"]["metadataOptions"]
        assert options["httpPutResponseHopLimit"] == hops and options["httpTokens"] == "required"


def test_flyte_finds_the_partitions_that_count_as_gpus() -> None:
    divided = site(mig="1g.10gb", mig_strategy="single", gpu="1", processes=1)
    (pool,) = (each for each in of_kind(divided, "NodePool") if "gpu" in each["metadata"]["name"])
    assert pool["spec"]["template"]["metadata"]["labels"] == {
        "k8s.amazonaws.com/accelerator": "nvidia-a100-80gb",
        "k8s.amazonaws.com/gpu-partition-size": "1g.10gb",
        "nvidia.com/mig.config": "slipstream-1g.10gb",
    }
    assert "replicas" not in pool["spec"]
    (values,) = (tree for file in build_manifests(divided, None) for tree in trees(file) if "mig" in tree)
    assert values["mig"]["strategy"] == "single"


def test_gpus_of_another_maker_are_asked_for_by_its_name() -> None:
    amd = site(gpu_resource="amd.com/gpu", accelerator="", notices="aws")
    (pool,) = (each for each in of_kind(amd, "NodePool") if "gpu" in each["metadata"]["name"])
    assert requirement(pool, "karpenter.k8s.aws/instance-gpu-manufacturer") == ["amd"]


def test_a_limit_leaves_room_for_whole_nodes() -> None:
    (pool,) = (each for each in of_kind(site(gpu="1", processes=1), "NodePool") if "gpu" in each["metadata"]["name"])
    assert pool["spec"]["limits"] == {"nvidia.com/gpu": "8"}


def test_adapters_pages_and_cpus_are_what_pods_ask_for() -> None:
    spec = named("h100-efa-spot", "EC2NodeClass", "slipstream-gpu")["spec"]
    adapters = [each for each in spec["networkInterfaces"] if each["interfaceType"] == "efa-only"]
    assert len(adapters) == 32
    places = [(each["networkCardIndex"], each["deviceIndex"]) for each in spec["networkInterfaces"]]
    assert len(set(places)) == 33 and spec["networkInterfaces"][0]["interfaceType"] == "interface"
    _, script, settings = message_from_string(spec["userData"]).walk()
    assert [part.get_content_type() for part in (script, settings)] == SCRIPT_AND_SETTINGS
    assert "vm.nr_hugepages=2560\n" in str(script.get_payload())
    assert yaml.safe_load(str(settings.get_payload()))["spec"]["kubelet"]["config"]["cpuManagerPolicy"] == "static"
    half = site(
        gpu="4", processes=4, efa=16, hugepages="512Mi", node_selector={TYPE_LABEL: "p5.48xlarge"}, accelerator=""
    )
    (machine,) = (each for each in of_kind(half, "EC2NodeClass") if "gpu" in each["metadata"]["name"])
    assert "vm.nr_hugepages=512\n" in machine["spec"]["userData"]
    assert len(machine["spec"]["networkInterfaces"]) == 33
    assert not {"networkInterfaces", "userData"} & set(named("a100-spot", "EC2NodeClass", "slipstream-gpu")["spec"])


def test_machines_have_what_any_of_their_stages_asks_for() -> None:
    tables = {
        "distributed": {**GPUS, "nodes": 2},
        "stages": {"collectives": {"efa": 4, "hugepages": "512Mi", "numa": True, "nodes": 1}},
    }
    found = of_kind(profile_site(parse_profile("mine", tables), "churn", "mine"), "EC2NodeClass")
    (machine,) = (tree["spec"] for tree in found if "gpu" in tree["metadata"]["name"])
    assert len(machine["networkInterfaces"]) == 5
    assert "nr_hugepages=256" in machine["userData"] and "cpuManagerPolicy" in machine["userData"]


def test_disks_hold_what_pods_ask_for() -> None:
    for kind, stage in (("gpu", "train"), ("cpu", "prepare")):
        asked = parse_quantity(pod_placements(load_profile("a100-spot"))[stage].resources["ephemeral-storage"])
        (disk,) = named("a100-spot", "EC2NodeClass", f"slipstream-{kind}")["spec"]["blockDeviceMappings"]
        assert asked < parse_quantity(disk["ebs"]["volumeSize"]) < 2 * asked
