"""A model is served by pods like those that timed it, and scaled by a meaningful metric."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from slipstream.operations.manifests.build import build_manifests
from slipstream.operations.manifests.command import main
from slipstream.operations.manifests.site import profile_site
from slipstream.operations.manifests.triton import PlannedService, TritonService
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.profile import Profile, load_profile, parse_profile
from tests.support import REPOSITORY
from tests.support.wording import line_with, same_wording
from tests.support.written_manifests import PROFILES, named, objects, trees

Tree = dict[str, Any]


def test_a_model_is_served_by_pods_like_those_that_timed_it_on_capacity_that_stays() -> None:
    for profile in PROFILES:
        pod = named(profile, "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        export = load_profile(profile).asked("export")
        cpus = {} if int(export.gpu) else {"cpu": "1100m"}
        assert container["resources"]["requests"] == container["resources"]["limits"] == export.resources | cpus
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
    profile: Profile = parse_profile("mine", {"stages": {"export": own}})
    made = build_manifests(profile_site(profile, "churn", "mine"), TritonService("s3://bucket/triton", keda=False))
    found = [tree["kind"] for file in made for tree in trees(file) if "kind" in tree]
    assert "ScaledObject" in found and "HorizontalPodAutoscaler" not in found


#: A model of two threads on an instance of 8 CPUs.
SERVICE = {"variant": "onnx-int8", "instance": "c7i.2xlarge", "least": 1, "most": 13, "busy": 0.5}
PLAN = {"service": {**SERVICE, "threads": 2, "cpus": 8, "memory_gib": 32}}


def with_plan(path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = path.with_name("out")
    ended = CliRunner().invoke(main, ["a100-spot", "--out", str(out), "--serve", "--plan", str(path), *arguments])
    assert ended.exit_code == 0 and "(--plan)" not in ended.output, ended.output
    return [tree for tree in yaml.safe_load_all((out / "60-triton.yaml").read_text(encoding="utf-8")) if tree]


def test_replicas_target_and_instance_are_those_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    kinds = {tree["kind"]: tree["spec"] for tree in with_plan(tmp_path / "plan.json") if "spec" in tree}
    scaled = kinds["HorizontalPodAutoscaler"]
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (1, 13)
    assert scaled["metrics"][0]["resource"]["target"]["averageUtilization"] == 50
    selector = kinds["Deployment"]["template"]["spec"]["nodeSelector"]
    assert selector["node.kubernetes.io/instance-type"] == "c7i.2xlarge"
    (container,) = kinds["Deployment"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "2200m"
    kinds = {tree["kind"]: tree["spec"] for tree in with_plan(tmp_path / "plan.json", "--keda") if "spec" in tree}
    scaled = kinds["ScaledObject"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 13)
    # Of constant computing times: half the time busy, a request waits for half a computing time (M/D/1).
    assert float(scaled["triggers"][0]["metadata"]["threshold"]) == 0.5


def test_without_a_plan_its_numbers_are_assumed(tmp_path: Path) -> None:
    for own in ([], ["--keda"]):
        ended = CliRunner().invoke(main, ["a100-spot", "--out", str(tmp_path / "out"), "--serve", *own])
        same_wording(line_with("(--plan)", ended.output))
        same_wording(line_with("(export.threads)", ended.output))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("busy", [0.005, 0.5, 0.7, 0.9, 1.3])
def test_replicas_that_cannot_compute_more_are_joined_by_others(threads: int, busy: float) -> None:
    """By Kubernetes' formula (autoscaling: "Algorithm details"), for models whose threads all compute.

    desired = ceil(replicas x use / target), but unchanged if use / target is within a tenth of 1.
    """
    plan = PlannedService("onnx-int8", "", 1, 100, busy, threads=threads)
    made = build_manifests(
        profile_site(load_profile("a100-spot"), "churn", "mine"), TritonService("s3://m", keda=False, plan=plan)
    )
    (file,) = (file for file in made if "triton" in file.path)
    kinds = {tree["kind"]: tree["spec"] for tree in trees(file) if "spec" in tree}
    (metric,) = kinds["HorizontalPodAutoscaler"]["metrics"]
    (container,) = kinds["Deployment"]["template"]["spec"]["containers"]
    use = threads / parse_quantity(container["resources"]["requests"]["cpu"])
    assert use <= 1 <= 1.2 * use and use / (metric["resource"]["target"]["averageUtilization"] / 100) > 1.1


@pytest.mark.parametrize(
    "wrong",
    [
        {"instance": "c3-highcpu-4"},
        {"instance": "Standard_F4s_v2"},
        {"memory_gib": 16},
        {"cpus": 2},
        {"threads": -1},
    ],
)
def test_an_instance_of_another_cloud_or_too_small_for_a_replica_is_one_line(tmp_path: Path, wrong: Tree) -> None:
    """Of the export's 16 GiB and two threads; a node's system pods need some of it."""
    (tmp_path / "plan.json").write_text(json.dumps({"service": PLAN["service"] | wrong}))
    arguments = ["a100-spot", "--out", str(tmp_path / "out"), "--serve", "--plan", str(tmp_path / "plan.json")]
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 1 and ended.output.count("\n") == 1 and not (tmp_path / "out").exists(), ended.output
    same_wording(ended.output)


@pytest.mark.parametrize(("of_each", "fewer"), [(1, False), (2, True), (3, True)])
def test_replicas_that_share_an_instance_in_the_plan_alone_are_named(tmp_path: Path, of_each: int, fewer: bool) -> None:
    """Two of 16 GiB leave nothing of 32 to the system's pods."""
    (tmp_path / "plan.json").write_text(json.dumps({"service": PLAN["service"] | {"of_each": of_each}}))
    arguments = ["a100-spot", "--out", str(tmp_path / "out"), "--serve", "--plan", str(tmp_path / "plan.json")]
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 0 and ("not as planned: " in ended.output) == fewer
    if fewer:
        same_wording(line_with("not as planned", ended.output))


def test_what_an_older_plan_does_not_know_is_assumed(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"service": SERVICE}))
    arguments = ["a100-spot", "--out", str(tmp_path / "out"), "--serve", "--plan", str(tmp_path / "plan.json")]
    ended = CliRunner().invoke(main, arguments)
    same_wording(line_with("whose size is not known", ended.output))
    assert "1 thread per model" in ended.output


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"service": PLAN["service"] | {"least": 0}}), '{"service": {"least": 1}}']
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    arguments = ["a100-spot", "--out", str(tmp_path / "out"), "--plan", str(tmp_path / "plan.json")]
    for own in (["--serve"], []):
        ended = CliRunner().invoke(main, [*arguments, *own])
        assert ended.exit_code == 1 and not (tmp_path / "out").exists()
        same_wording(ended.output)
