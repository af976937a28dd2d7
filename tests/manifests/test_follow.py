"""What manifests say follows from the profile, and what does not apply is not there."""

from __future__ import annotations

from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from slipstream.errors import UserError
from slipstream.machine.limits import parse_quantity
from slipstream.manifests.build import manifests
from slipstream.manifests.documents import MARK, rendered
from slipstream.manifests.partitions import PARTITIONS
from slipstream.manifests.site import Site, site_of
from slipstream.manifests.triton import Serving
from slipstream.plan.command import main as plan
from slipstream.profiles.needs import asked_by, placements, tolerates
from slipstream.profiles.placement import TYPE_LABEL
from slipstream.profiles.profile import Profile, load, parse
from tests.support import REPOSITORY
from tests.support.measured_trainings import write_run
from tests.support.written_manifests import PROFILES, files, named, objects, trees

SCRIPT_AND_SETTINGS = ["text/x-shellscript", "application/node.eks.aws"]
BOTH, BOTH_QUEUES = ("spot", "on-demand"), ("production", "research")
GPUS = {"processes": 8, "gpu": "8", "cpu": "88", "memory": "1000Gi", "accelerator": "nvidia-a100-80gb"}


def site(**distributed: Any) -> Site:
    return site_of(parse("mine", {"distributed": {**GPUS, **distributed}}), "churn", "mine")


def of_kind(site: Site, kind: str) -> list[dict[str, Any]]:
    found = [tree for file in manifests(site, None) for tree in trees(file)]
    return [tree for tree in found if tree.get("kind") == kind]


def paths(profile: str) -> list[str]:
    return [file.path for file in files(profile)]


def requirement(pool: dict[str, Any], key: str) -> list[str]:
    (found,) = [each for each in pool["spec"]["template"]["spec"]["requirements"] if each["key"] == key]
    values: list[str] = found["values"]
    return values


# Files


def test_what_does_not_apply_is_not_there() -> None:
    common = {"00-namespaces.yaml", "20-priorities.yaml", "30-kueue.yaml", "40-quota.yaml", "60-triton.yaml"}
    common |= {"instead-of-kueue/volcano.yaml"}
    nvidia = {"10-karpenter.yaml", "helm/gpu-operator.yaml"}
    assert set(paths("a100-spot")) == set(paths("h100-efa-spot")) == common | nvidia
    assert set(paths("a100-mig")) == common | nvidia | {"50-gpu-partitions.yaml"}
    assert set(paths("t4-shared")) == common | nvidia | {"50-gpu-sharing.yaml"}
    assert set(paths("mi300x")) == set(paths("l4-spot")) == common
    assert "60-triton.yaml" not in {file.path for file in manifests(site(), None)}


def test_amd_has_nothing_of_nvidias() -> None:
    texts = [rendered(file, "mi300x").lower() for file in files("mi300x")]
    assert not [text for text in texts if "nvidia.com" in text or "gpu-operator" in text]
    assert any("requests.amd.com/gpu" in text for text in texts)


@pytest.mark.parametrize("profile", PROFILES)
def test_files_are_in_the_order_in_which_kubectl_applies_them_and_each_says_why(profile: str) -> None:
    applied = [path for path in paths(profile) if "/" not in path]
    assert applied == sorted(applied) == paths(profile)[: len(applied)]
    for file in files(profile):
        first, second, *_ = rendered(file, profile).splitlines()
        assert first.startswith(f"{MARK} for the profile {profile}: ") and second.startswith("#")
        assert all(len(document.why) > 15 for document in file.documents)
    namespaces = {tree["metadata"]["name"] for tree in objects(profile) if tree["kind"] == "Namespace"}
    assert {tree["metadata"]["namespace"] for tree in objects(profile) if "namespace" in tree["metadata"]} <= namespaces


def test_the_bytes_are_those_of_the_trees() -> None:
    for file in files("h100-efa-spot"):
        text = rendered(file, "h100-efa-spot")
        assert text == rendered(file, "h100-efa-spot") and "&id" not in text
        assert ("userData: |\n" in text) is (file.path == "10-karpenter.yaml")
        assert list(yaml.safe_load_all(text)) == list(trees(file))


# Nodes


@pytest.mark.parametrize("profile", ["a100-mig", "a100-spot", "h100-efa-spot", "t4-shared"])
def test_every_pod_finds_a_pool_that_it_tolerates(profile: str) -> None:
    pools = [tree for tree in objects(profile) if tree["kind"] == "NodePool"]
    for stage, placement in placements(load(profile)).items():
        kind = "gpu" if int(placement.gpu) else "cpu"
        fit = [
            pool["metadata"]["name"]
            for pool in pools
            if all(tolerates(placement, taint) for taint in pool["spec"]["template"]["spec"].get("taints", []))
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
    train = placements(load("a100-spot"))["train"]
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
    (values,) = (tree for file in manifests(divided, None) for tree in trees(file) if "mig" in tree)
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
    found = of_kind(site_of(parse("mine", tables), "churn", "mine"), "EC2NodeClass")
    (machine,) = (tree["spec"] for tree in found if "gpu" in tree["metadata"]["name"])
    assert len(machine["networkInterfaces"]) == 5
    assert "nr_hugepages=256" in machine["userData"] and "cpuManagerPolicy" in machine["userData"]


def test_disks_hold_what_pods_ask_for() -> None:
    for kind, stage in (("gpu", "train"), ("cpu", "prepare")):
        asked = parse_quantity(placements(load("a100-spot"))[stage].resources["ephemeral-storage"])
        (disk,) = named("a100-spot", "EC2NodeClass", f"slipstream-{kind}")["spec"]["blockDeviceMappings"]
        assert asked < parse_quantity(disk["ebs"]["volumeSize"]) < 2 * asked


# Queues and quotas


@pytest.mark.parametrize("profile", PROFILES)
def test_quotas_hold_what_any_stage_asks_for(profile: str) -> None:
    for tree in (tree for tree in objects(profile) if tree["kind"] == "ResourceQuota"):
        for placement in placements(load(profile)).values():
            for name, amount in asked_by(placement).items():
                assert parse_quantity(tree["spec"]["hard"][f"requests.{name}"]) >= amount
    for tree in (tree for tree in objects(profile) if tree["kind"] == "ClusterQueue"):
        (group,) = tree["spec"]["resourceGroups"]
        for placement in placements(load(profile)).values():
            asked = asked_by(placement)
            assert set(asked) <= set(group["coveredResources"])
            quotas = [{each["name"]: each["nominalQuota"] for each in f["resources"]} for f in group["flavors"]]
            assert all(set(quota) == set(group["coveredResources"]) for quota in quotas)
            assert any(all(parse_quantity(quota[name]) >= asked[name] for name in asked) for quota in quotas)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_namespace_may_use_what_its_queue_borrows(profile: str) -> None:
    queues = [tree for tree in objects(profile) if tree["kind"] == "ClusterQueue"]
    assert {queue["spec"]["cohortName"] for queue in queues} == {"slipstream"}
    (gpus,) = {p.gpu_name for p in placements(load(profile)).values() if int(p.gpu)}
    for flavour in {each["name"] for each in queues[0]["spec"]["resourceGroups"][0]["flavors"]}:
        total = sum(
            parse_quantity(resource["nominalQuota"])
            for queue in queues
            for each in queue["spec"]["resourceGroups"][0]["flavors"]
            for resource in each["resources"]
            if each["name"] == flavour and resource["name"] == gpus
        )
        for tree in (tree for tree in objects(profile) if tree["kind"] == "ResourceQuota"):
            assert parse_quantity(tree["spec"]["hard"][f"requests.{gpus}"]) >= total


def test_a_quota_is_twice_a_training_and_what_may_run_beside() -> None:
    train, prepare = (placements(load("a100-spot"))[stage] for stage in ("train", "prepare"))
    both = sum(parse_quantity(each.cpu) * each.nodes for each in (train, prepare))
    quotas = [tree for tree in objects("a100-spot") if tree["kind"] == "ResourceQuota"]
    assert [parse_quantity(tree["spec"]["hard"]["requests.cpu"]) for tree in quotas] == [2 * both] * 2
    assert [tree["spec"]["hard"]["requests.nvidia.com/gpu"] for tree in quotas] == ["32"] * 2


def test_a_queue_of_a_namespace_leads_to_the_one_of_its_name() -> None:
    queues = [tree for tree in objects("a100-spot") if tree["kind"] == "LocalQueue"]
    local = {tree["metadata"]["namespace"]: tree["spec"]["clusterQueue"] for tree in queues}
    assert local == {"churn-production": "slipstream-production", "churn-development": "slipstream-research"}
    for tree in objects("a100-spot"):
        if tree["kind"] == "ClusterQueue":
            (namespace,) = tree["spec"]["namespaceSelector"]["matchLabels"].values()
            assert local[namespace] == tree["metadata"]["name"]
        if tree["kind"] == "Namespace" and tree["metadata"]["name"] in local:
            assert list(tree["metadata"]["annotations"].values()) == [local[tree["metadata"]["name"]]]


def test_production_goes_first_and_research_pays_for_no_capacity_on_demand() -> None:
    priorities = {t["metadata"]["name"]: t["value"] for t in objects("a100-spot") if t["kind"] == "PriorityClass"}
    assert sorted(priorities, key=priorities.__getitem__) == [
        *("slipstream-research", "slipstream-production", "slipstream-serving"),
    ]
    for queue, gpus in (("production", "16"), ("research", "0")):
        (group,) = named("a100-spot", "ClusterQueue", f"slipstream-{queue}")["spec"]["resourceGroups"]
        quotas = {f["name"]: {r["name"]: r["nominalQuota"] for r in f["resources"]} for f in group["flavors"]}
        assert quotas["slipstream-gpu-on-demand"]["nvidia.com/gpu"] == gpus
        assert quotas["slipstream-gpu-spot"]["nvidia.com/gpu"] == "16"


def test_what_is_lent_is_given_back_to_production_only() -> None:
    policies = {
        queue: named("a100-spot", "ClusterQueue", f"slipstream-{queue}")["spec"]["preemption"] for queue in BOTH_QUEUES
    }
    assert policies["production"] == {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"}
    assert policies["research"] == {"withinClusterQueue": "Never", "reclaimWithinCohort": "Never"}
    lent = {queue: named("a100-spot", "Queue", f"slipstream-{queue}")["spec"]["reclaimable"] for queue in BOTH_QUEUES}
    assert lent == {"production": False, "research": True}
    classes = {queue: named("a100-spot", "PriorityClass", f"slipstream-{queue}") for queue in BOTH_QUEUES}
    assert classes["research"]["preemptionPolicy"] == "Never" != classes["production"]["preemptionPolicy"]


def test_a_flavour_is_of_a_pool_and_has_its_taints() -> None:
    pools = {tree["metadata"]["name"]: tree for tree in objects("a100-spot") if tree["kind"] == "NodePool"}
    found = [tree for tree in objects("a100-spot") if tree["kind"] == "ResourceFlavor"]
    assert {tree["metadata"]["name"] for tree in found} == set(pools)
    for tree in found:
        name = tree["metadata"]["name"]
        assert tree["spec"]["nodeLabels"] == {"karpenter.sh/nodepool": name}
        assert tree["spec"].get("nodeTaints") == pools[name]["spec"]["template"]["spec"].get("taints")
    labels = named("l4-spot", "ResourceFlavor", "slipstream-gpu")["spec"]["nodeLabels"]
    assert labels == load("l4-spot").asked("train").node_selector


def test_a_profile_with_volcanos_scheduler_has_its_queues_and_none_of_kueues() -> None:
    found = manifests(site(scheduler="volcano"), None)
    assert "30-volcano.yaml" in {file.path for file in found}
    assert not [file.path for file in found if "kueue" in file.path]


def test_research_has_its_own_on_demand_for_what_does_not_run_on_spot() -> None:
    tables = {"distributed": {**GPUS, "interruptible": True}, "stages": {"collectives": {"interruptible": False}}}
    found = of_kind(site_of(parse("mine", tables), "churn", "mine"), "ClusterQueue")
    (queue,) = (tree for tree in found if tree["metadata"]["name"] == "slipstream-research")
    flavours = {each["name"]: each["resources"] for each in queue["spec"]["resourceGroups"][0]["flavors"]}
    gpus = {name: [r["nominalQuota"] for r in each if r["name"] == "nvidia.com/gpu"] for name, each in flavours.items()}
    assert gpus["slipstream-gpu-on-demand"] == gpus["slipstream-gpu-spot"] == ["8"]


# The GPU operator


def operator(profile: str) -> dict[str, Any]:
    (file,) = (file for file in files(profile) if file.path.startswith("helm/"))
    (values,) = trees(file)
    return values


def test_the_operators_pods_tolerate_what_nodes_are_tainted_with() -> None:
    values = operator("a100-spot")
    for tolerations in (
        values["daemonsets"]["tolerations"],
        values["node-feature-discovery"]["worker"]["tolerations"],
    ):
        assert {"nvidia.com/gpu", "slipstream/spot"} <= {each["key"] for each in tolerations}


def test_driver_and_toolkit_are_those_of_the_nodes_image() -> None:
    values = operator("a100-spot")
    assert values["driver"] == values["toolkit"] == {"enabled": False}
    monitor = values["dcgmExporter"]["serviceMonitor"]
    assert monitor["enabled"] is True
    ours = yaml.safe_load((REPOSITORY / "monitoring/podmonitor.yaml").read_text(encoding="utf-8"))
    assert monitor["additionalLabels"] == ours["metadata"]["labels"]


def test_partitions_are_those_of_the_profile_and_their_nodes_are_labelled() -> None:
    config = yaml.safe_load(named("a100-mig", "ConfigMap")["data"]["config.yaml"])["mig-configs"]
    labels = named("a100-mig", "NodePool", "slipstream-gpu-on-demand")["spec"]["template"]["metadata"]["labels"]
    (divided,) = config[labels["nvidia.com/mig.config"]]
    assert divided["mig-devices"] == {"1g.5gb": 7} and divided["mig-enabled"] is True
    values = operator("a100-mig")
    assert values["mig"]["strategy"] == "mixed" and values["migManager"]["enabled"] is True
    assert values["migManager"]["config"]["name"] == named("a100-mig", "ConfigMap")["metadata"]["name"]
    assert values["migManager"]["config"]["default"] in config
    assert operator("a100-spot")["migManager"] == {"enabled": False}


def test_a_partition_that_nobody_knows_is_one_line() -> None:
    with pytest.raises(UserError, match=r"profile\.mig: 9g\.1gb: no partition that is known; expected one of 1g\.5gb"):
        manifests(site(mig="9g.1gb", gpu="1", processes=1, accelerator=""), None)


def test_partitions_are_those_of_the_accelerator() -> None:
    h100 = site(mig="1g.10gb", mig_strategy="single", gpu="1", processes=1, accelerator="nvidia-h100-80gb")
    (pool,) = (each for each in of_kind(h100, "NodePool") if "gpu" in each["metadata"]["name"])
    assert requirement(pool, TYPE_LABEL) == ["p5.48xlarge"]
    with pytest.raises(UserError, match=r"1g\.5gb: no partition of A100-80GB that is known; expected one of 1g\.10gb"):
        manifests(site(mig="1g.5gb", mig_strategy="single", gpu="1", processes=1), None)
    with pytest.raises(UserError, match="no partition of L4 that is known; expected another accelerator"):
        manifests(site(mig="1g.5gb", mig_strategy="single", gpu="1", processes=1, accelerator="nvidia-l4"), None)


def test_partitions_fill_a_gpu_and_no_more() -> None:
    for name, known in PARTITIONS.items():
        slices = int(name[0]) * known.number
        assert slices <= 7 < slices + 4


@pytest.mark.parametrize(("kind", "key"), [("time-slicing", "timeSlicing"), ("mps", "mps")])
@pytest.mark.parametrize("resource", ["", "nvidia.com/gpu"])
def test_a_shared_gpu_has_the_name_that_pods_ask_for(kind: str, key: str, resource: str) -> None:
    shared = site(shared_gpu=kind, gpu_resource=resource, gpu="1", processes=1, accelerator="")
    (tree,) = of_kind(shared, "ConfigMap")
    pool = next(pool for pool in of_kind(shared, "NodePool") if "gpu" in pool["metadata"]["name"])
    config = tree["data"][pool["spec"]["template"]["metadata"]["labels"]["nvidia.com/device-plugin.config"]]
    entry = yaml.safe_load(config)["sharing"][key]
    assert entry["renameByDefault"] is (resource == "")
    assert entry.get("failRequestsGreaterThanOne") is (True if kind == "time-slicing" else None)
    assert entry["resources"] == [{"name": "nvidia.com/gpu", "replicas": 4}]
    (values,) = (tree for file in manifests(shared, None) for tree in trees(file) if "devicePlugin" in tree)
    assert values["devicePlugin"]["config"]["default"] in tree["data"]


def test_a_shared_partition_is_one_of_its_kind() -> None:
    found = of_kind(site(shared_gpu="mps", mig="1g.10gb", gpu="1", processes=1, accelerator=""), "ConfigMap")
    (config,) = (yaml.safe_load(tree["data"]["mps"]) for tree in found if "mps" in tree["data"])
    assert config["flags"] == {"migStrategy": "mixed"}
    assert [each["name"] for each in config["sharing"]["mps"]["resources"]] == ["nvidia.com/mig-1g.10gb"]


def test_the_operator_stays_off_nodes_without_gpus() -> None:
    tables = {"default": {"tolerations": [{"key": "cpus"}]}, "distributed": {**GPUS, "tolerations": [{"key": "gpus"}]}}
    made = manifests(site_of(parse("mine", tables), "churn", "mine"), None)
    (values,) = (tree for file in made for tree in trees(file) if "daemonsets" in tree)
    assert [each["key"] for each in values["daemonsets"]["tolerations"]] == ["gpus"]


# A model in service


def test_a_model_is_served_by_pods_like_those_that_timed_it_on_capacity_that_stays() -> None:
    for profile in PROFILES:
        pod = named(profile, "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        export = load(profile).asked("export")
        assert container["resources"]["requests"] == container["resources"]["limits"] == export.resources
        assert not [word for word in str(pod).split() if "spot" in word]
        assert pod["terminationGracePeriodSeconds"] <= (15 if profile == "l4-spot" else 30)
        assert "--model-repository=s3://bucket/triton" in container["args"]
        (exit_s,) = (int(arg.partition("=")[2]) for arg in container["args"] if arg.startswith("--exit-timeout"))
        drain_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert exit_s + drain_s <= pod["terminationGracePeriodSeconds"]
    assert named("a100-spot", "Deployment")["spec"]["template"]["spec"]["nodeSelector"] == {
        "karpenter.sh/capacity-type": "on-demand"
    }


def test_it_scales_by_cpus_or_by_its_queue_and_never_to_none() -> None:
    (metric,) = named("a100-spot", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["resource"]["name"] == "cpu"
    scaled = named("a100-spot", "ScaledObject", keda=True)["spec"]
    assert scaled["minReplicaCount"] == 2
    (trigger,) = scaled["triggers"]
    assert "nv_inference_queue_duration_us" in trigger["metadata"]["query"] and trigger["metricType"] == "Value"
    assert trigger["metadata"]["ignoreNullValues"] == "false"  # else a figure that is missing scales to the least
    assert not [tree for tree in objects("a100-spot", keda=True) if tree["kind"] == "HorizontalPodAutoscaler"]


def test_a_node_can_be_drained_though_a_model_is_served() -> None:
    assert named("a100-spot", "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert named("a100-spot", "HorizontalPodAutoscaler")["spec"]["minReplicas"] > 1


def test_what_keda_reads_is_scraped() -> None:
    monitor = yaml.safe_load((REPOSITORY / "monitoring/podmonitor-triton.yaml").read_text(encoding="utf-8"))["spec"]
    served = named("a100-spot", "Deployment")
    assert monitor["selector"]["matchLabels"] == served["spec"]["template"]["metadata"]["labels"]
    assert monitor["namespaceSelector"]["matchNames"] == [served["metadata"]["namespace"]]
    (container,) = served["spec"]["template"]["spec"]["containers"]
    assert monitor["podMetricsEndpoints"][0]["port"] in {each["name"] for each in container["ports"]}
    (trigger,) = named("a100-spot", "ScaledObject", keda=True)["spec"]["triggers"]
    assert f'namespace="{served["metadata"]["namespace"]}"' in trigger["metadata"]["query"]


def test_a_model_on_gpus_is_not_scaled_by_its_cpus() -> None:
    own = {"gpu": "1", "accelerator": "nvidia-l4"}
    profile: Profile = parse("mine", {"stages": {"export": own}})
    made = manifests(site_of(profile, "churn", "mine"), Serving("s3://bucket/triton", keda=False))
    found = [tree["kind"] for file in made for tree in trees(file) if "kind" in tree]
    assert "ScaledObject" in found and "HorizontalPodAutoscaler" not in found


def test_a_profile_of_the_plan_is_one_of_amazons_if_its_instance_is(tmp_path: Path) -> None:
    for name, clouds in (("g6.2xlarge", "aws"), ("g2-standard-4", "gcp"), ("Standard_NC24ads_A100_v4", "azure")):
        file = tmp_path / "mine.toml"
        file.write_text(
            '[distributed]\ngpu = "1"\ninterruptible = true\n'
            f'node_selector = {{ "node.kubernetes.io/instance-type" = "{name}" }}\n'
        )
        found = site_of(load(str(file)), "churn", "mine")
        assert found.cloud == clouds
        assert bool(of_kind(found, "NodePool")) is (clouds == "aws")


def test_the_profile_that_a_plan_writes_has_its_manifests(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    planned = CliRunner().invoke(plan, ["--measured", run, "--write", str(tmp_path / "mine.toml")])
    assert planned.exit_code == 0, planned.output
    profile = load(str(tmp_path / "mine.toml"))
    made = [tree for file in manifests(site_of(profile, "churn", "mine"), None) for tree in trees(file)]
    quotas = [tree["spec"]["hard"] for tree in made if tree.get("kind") == "ResourceQuota"]
    gpus = int(profile.asked("train").gpu) * profile.asked("train").nodes
    assert [int(hard["requests.nvidia.com/gpu"]) for hard in quotas] == [2 * gpus] * 2 and gpus > 0
