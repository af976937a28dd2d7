"""A model is served by pods like those that timed it, and scaled by a meaningful metric."""

import yaml

from slipstream.operations.manifests.build import build_manifests
from slipstream.operations.manifests.site import profile_site
from slipstream.operations.manifests.triton import TritonService
from slipstream.shared.profiles.profile import Profile, load_profile, parse_profile
from tests.support import REPOSITORY
from tests.support.written_manifests import PROFILES, named, objects, trees


def test_a_model_is_served_by_pods_like_those_that_timed_it_on_capacity_that_stays() -> None:
    for profile in PROFILES:
        pod = named(profile, "Deployment")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        export = load_profile(profile).asked("export")
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
    profile: Profile = parse_profile("mine", {"stages": {"export": own}})
    made = build_manifests(profile_site(profile, "churn", "mine"), TritonService("s3://bucket/triton", keda=False))
    found = [tree["kind"] for file in made for tree in trees(file) if "kind" in tree]
    assert "ScaledObject" in found and "HorizontalPodAutoscaler" not in found
