"""Sharing and partitioning of GPUs, and the operator's settings, follow from the profile."""

from typing import Any

import pytest
import yaml

from slipstream.operations.manifests.build import build_manifests
from slipstream.operations.manifests.pools import PARTITIONS
from slipstream.operations.manifests.site import profile_site
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.placement import TYPE_LABEL
from slipstream.shared.profiles.profile import parse_profile
from tests.support import REPOSITORY
from tests.support.wording import refuses
from tests.support.written_manifests import GPUS, files, named, of_kind, requirement, site, trees


def operator(profile: str) -> dict[str, Any]:
    (file,) = (file for file in files(profile) if file.path.startswith("helm/"))
    (values,) = trees(file)
    return values


def test_the_operators_pods_tolerate_what_nodes_are_tainted_with() -> None:
    values = operator("a100-spot")
    for tolerations in (values["daemonsets"]["tolerations"], values["node-feature-discovery"]["worker"]["tolerations"]):
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
    with refuses(UserError, match=r"profile\.mig:"):
        build_manifests(site(mig="9g.1gb", gpu="1", processes=1, accelerator=""), None)


def test_partitions_are_those_of_the_accelerator() -> None:
    h100 = site(mig="1g.10gb", mig_strategy="single", gpu="1", processes=1, accelerator="nvidia-h100-80gb")
    (pool,) = (each for each in of_kind(h100, "NodePool") if "gpu" in each["metadata"]["name"])
    assert requirement(pool, TYPE_LABEL) == ["p5.48xlarge"]
    with refuses(UserError, match=r"1g\.5gb:"):
        build_manifests(site(mig="1g.5gb", mig_strategy="single", gpu="1", processes=1), None)
    with refuses(UserError):
        build_manifests(site(mig="1g.5gb", mig_strategy="single", gpu="1", processes=1, accelerator="nvidia-l4"), None)


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
    (values,) = (tree for file in build_manifests(shared, None) for tree in trees(file) if "devicePlugin" in tree)
    assert values["devicePlugin"]["config"]["default"] in tree["data"]


def test_a_shared_partition_is_one_of_its_kind() -> None:
    found = of_kind(site(shared_gpu="mps", mig="1g.10gb", gpu="1", processes=1, accelerator=""), "ConfigMap")
    (config,) = (yaml.safe_load(tree["data"]["mps"]) for tree in found if "mps" in tree["data"])
    assert config["flags"] == {"migStrategy": "mixed"}
    assert [each["name"] for each in config["sharing"]["mps"]["resources"]] == ["nvidia.com/mig-1g.10gb"]


def test_the_operator_stays_off_nodes_without_gpus() -> None:
    tables = {"default": {"tolerations": [{"key": "cpus"}]}, "distributed": {**GPUS, "tolerations": [{"key": "gpus"}]}}
    made = build_manifests(profile_site(parse_profile("mine", tables), "churn", "mine"), None)
    (values,) = (tree for file in made for tree in trees(file) if "daemonsets" in tree)
    assert [each["key"] for each in values["daemonsets"]["tolerations"]] == ["gpus"]
