"""Queues and quotas cover the profile's requests, and production has priority."""

import pytest

from slipstream.operations.manifests.build import build_manifests
from slipstream.operations.manifests.site import profile_site
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.needs import asked_by, pod_placements
from slipstream.shared.profiles.profile import load_profile, parse_profile
from tests.support.written_manifests import GPUS, PROFILES, named, objects, of_kind, site

BOTH_QUEUES = ("production", "research")


@pytest.mark.parametrize("profile", PROFILES)
def test_quotas_hold_what_any_stage_asks_for(profile: str) -> None:
    for tree in (tree for tree in objects(profile) if tree["kind"] == "ResourceQuota"):
        for placement in pod_placements(load_profile(profile)).values():
            for name, amount in asked_by(placement).items():
                assert parse_quantity(tree["spec"]["hard"][f"requests.{name}"]) >= amount
    for tree in (tree for tree in objects(profile) if tree["kind"] == "ClusterQueue"):
        (group,) = tree["spec"]["resourceGroups"]
        for placement in pod_placements(load_profile(profile)).values():
            asked = asked_by(placement)
            assert set(asked) <= set(group["coveredResources"])
            quotas = [{each["name"]: each["nominalQuota"] for each in f["resources"]} for f in group["flavors"]]
            assert all(set(quota) == set(group["coveredResources"]) for quota in quotas)
            assert any(all(parse_quantity(quota[name]) >= asked[name] for name in asked) for quota in quotas)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_namespace_may_use_what_its_queue_borrows(profile: str) -> None:
    queues = [tree for tree in objects(profile) if tree["kind"] == "ClusterQueue"]
    assert {queue["spec"]["cohortName"] for queue in queues} == {"slipstream"}
    (gpus,) = {p.gpu_name for p in pod_placements(load_profile(profile)).values() if int(p.gpu)}
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
    train, prepare = (pod_placements(load_profile("a100-spot"))[stage] for stage in ("train", "prepare"))
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
        *("slipstream-research", "slipstream-production", "slipstream-serving")
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
    assert labels == load_profile("l4-spot").asked("train").node_selector


def test_a_profile_with_volcanos_scheduler_has_its_queues_and_none_of_kueues() -> None:
    found = build_manifests(site(scheduler="volcano"), None)
    assert "30-volcano.yaml" in {file.path for file in found}
    assert not [file.path for file in found if "kueue" in file.path]


def test_research_has_its_own_on_demand_for_what_does_not_run_on_spot() -> None:
    tables = {"distributed": {**GPUS, "interruptible": True}, "stages": {"collectives": {"interruptible": False}}}
    found = of_kind(profile_site(parse_profile("mine", tables), "churn", "mine"), "ClusterQueue")
    (queue,) = (tree for tree in found if tree["metadata"]["name"] == "slipstream-research")
    flavours = {each["name"]: each["resources"] for each in queue["spec"]["resourceGroups"][0]["flavors"]}
    gpus = {name: [r["nominalQuota"] for r in each if r["name"] == "nvidia.com/gpu"] for name, each in flavours.items()}
    assert gpus["slipstream-gpu-on-demand"] == gpus["slipstream-gpu-spot"] == ["8"]
