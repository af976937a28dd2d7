"""Manifests of any profile are valid, and the doctor finds nothing in them."""

import json
from typing import Any

import pytest

from slipstream.operations.doctor.manifests import check_manifests
from slipstream.operations.doctor.objects import KubernetesManifest
from slipstream.operations.manifests.build import build_manifests
from slipstream.operations.manifests.site import profile_site
from slipstream.operations.manifests.triton import TritonService
from slipstream.shared.profiles.profile import parse_profile
from tests.support.kube_schemas import CRDS, errors, errors_by_version, is_core
from tests.support.proving import first_few
from tests.support.written_manifests import trees

ONE = {"gpu": "1", "cpu": "3500m", "memory": "12288Mi"}
LOST = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
DEDICATED = {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoExecute"}
SPOT_AKS = {
    "key": "kubernetes.azure.com/scalesetpriority",
    "operator": "Equal",
    "value": "spot",
    "effect": "NoSchedule",
}
TABLES: dict[str, dict[str, Any]] = {
    "one GPU of any kind": {"distributed": ONE},
    "no tolerations, on spot": {"default": {"interruptible": True}, "distributed": {**ONE, "nodes": 3}},
    "tolerates all": {"default": {"tolerations": [{"operator": "Exists"}]}, "distributed": ONE},
    "any effect": {"distributed": {**ONE, "tolerations": [{"key": "nvidia.com/gpu"}, DEDICATED]}},
    "twice the same, and a lost node's": {
        "distributed": {**ONE, "tolerations": [DEDICATED, {**DEDICATED, "operator": "Exists", "value": ""}, LOST]}
    },
    "GPUs tolerated by all": {"default": {"tolerations": [{"key": "nvidia.com/gpu"}]}, "distributed": ONE},
    "partitions as GPUs": {
        "distributed": {**ONE, "mig": "3g.40gb", "mig_strategy": "single", "accelerator": "nvidia-h100-80gb"}
    },
    "a shared partition": {"distributed": {**ONE, "mig": "1g.10gb", "shared_gpu": "mps"}},
    "shared, not renamed": {"distributed": {**ONE, "shared_gpu": "time-slicing", "gpu_resource": "nvidia.com/gpu"}},
    "adapters of the site's own": {"distributed": {**ONE, "nodes": 2, "rdma": {"rdma/hca_shared": "1"}}},
    "adapters, no pages' plugin": {"distributed": {**ONE, "efa": 1, "hugepages": "512Mi", "numa": True, "cpu": "8"}},
    "machines that no price is known of": {
        "distributed": {
            **ONE,
            "hugepages": "512Mi",
            "tolerations": [{"key": "nvidia.com/gpu"}],
            "node_selector": {"node.kubernetes.io/instance-type": "p6-b200.48xlarge"},
        }
    },
    "zones and labels": {
        "distributed": {**ONE, "node_selector": {"team": "a", "topology.kubernetes.io/zone": "us-east-1a"}}
    },
    "of GPUs two kinds": {
        "distributed": {**ONE, "accelerator": "nvidia-l4"},
        "stages": {"collectives": {"accelerator": "nvidia-tesla-t4", "nodes": 2, "processes": 1}},
    },
    "a GPU for the export": {
        "default": {"interruptible": True},
        "distributed": ONE,
        "stages": {"export": {**ONE, "accelerator": "nvidia-l4", "tolerations": [DEDICATED]}},
    },
    "AMD's on EKS": {"distributed": {**ONE, "gpu_resource": "amd.com/gpu", "notices": "aws"}},
    "AKS": {"default": {"tolerations": [SPOT_AKS], "interruptible": True}, "distributed": {**ONE, "notices": "azure"}},
    "Volcano": {"distributed": {**ONE, "nodes": 2, "scheduler": "volcano"}},
    "no disk to speak of": {"default": {"data_cache_gib": 0.5, "disk": "900Mi"}, "distributed": {**ONE, "disk": "1Gi"}},
}


def objects(tables: dict[str, Any], keda: bool) -> list[dict[str, Any]]:
    made = build_manifests(
        profile_site(parse_profile("mine", tables), "churn", "mine"), TritonService("s3://bucket/triton", keda)
    )
    return [tree for file in made for tree in trees(file) if "kind" in tree]


@pytest.mark.parametrize("tables", first_few(TABLES.values(), 6), ids=TABLES)
def test_they_are_valid_and_the_doctor_finds_nothing(tables: dict[str, Any]) -> None:
    found = objects(tables, keda=True)
    for tree in found:
        if is_core(tree["apiVersion"]):
            assert not errors_by_version(json.dumps(tree)), tree
        elif CRDS.is_dir():
            assert not errors(tree), tree
    names = [(tree["kind"], tree["metadata"].get("namespace"), tree["metadata"]["name"]) for tree in found]
    assert len(set(names)) == len(names)
    report = check_manifests([KubernetesManifest("file.yaml", tree) for tree in found], parse_profile("mine", tables))
    assert not report.findings


def test_nodes_are_tainted_once_and_not_as_lost() -> None:
    found = objects(TABLES["twice the same, and a lost node's"], keda=False)
    taints = [tree["spec"]["template"]["spec"].get("taints") for tree in found if tree["kind"] == "NodePool"]
    assert [{"key": "dedicated", "effect": "NoExecute"}] in taints and sum(map(bool, taints)) == 1


def test_nodes_without_gpus_are_not_tainted_as_if_they_had_some() -> None:
    found = objects(TABLES["GPUs tolerated by all"], keda=False)
    taints = {
        t["metadata"]["name"]: t["spec"]["template"]["spec"].get("taints") for t in found if t["kind"] == "NodePool"
    }
    gpu = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    assert taints == {"slipstream-gpu-on-demand": gpu, "slipstream-cpu-on-demand": None}


def test_of_two_kinds_of_gpus_each_has_its_pool_and_machines() -> None:
    found = objects(TABLES["of GPUs two kinds"], keda=False)
    pools = {tree["metadata"]["name"]: tree["spec"] for tree in found if tree["kind"] == "NodePool"}
    classes = {tree["metadata"]["name"] for tree in found if tree["kind"] == "EC2NodeClass"}
    assert set(pools) == {f"slipstream-{kind}-on-demand" for kind in ("gpu", "gpu-2", "cpu")}
    assert {each["template"]["spec"]["nodeClassRef"]["name"] for each in pools.values()} == classes
    labels = [each["template"].get("metadata", {}).get("labels") for each in pools.values()]
    assert {"k8s.amazonaws.com/accelerator": "nvidia-tesla-t4"} in labels
