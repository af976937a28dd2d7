"""The doctor's findings in manifests: none in those of ``slipstream manifests``, and one for every flaw."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from slipstream.operations.doctor.command import main
from slipstream.operations.doctor.findings import Finding
from slipstream.operations.doctor.manifests import check_manifests, parse_duration
from slipstream.operations.doctor.objects import KubernetesManifest, read_manifests
from slipstream.operations.manifests.command import write_manifests
from slipstream.shared.profiles.profile import load_profile
from tests.support.wording import same_wording
from tests.support.written_manifests import PROFILES, files, named, objects

Tree = dict[str, Any]
PROFILE = "a100-spot"


def found(trees: list[Tree], profile: str = PROFILE) -> tuple[Finding, ...]:
    return check_manifests([KubernetesManifest("file.yaml", tree) for tree in trees], load_profile(profile)).findings


@pytest.mark.parametrize("keda", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
def test_our_own_have_none(profile: str, keda: bool) -> None:
    report = check_manifests(
        [KubernetesManifest("file.yaml", tree) for tree in objects(profile, keda)], load_profile(profile)
    )
    assert not report.findings and len(report.checked) + len(report.unchecked) == 2
    assert bool(report.unchecked) is (profile == "mi300x")


def node(tree: Tree) -> Tree:
    inner: Tree = tree["spec"]["template"]["spec"]
    return inner


def put(tree: Tree, *path_and_value: Any) -> None:
    *path, last, value = path_and_value
    for key in path:
        tree = tree[key]
    tree[last] = value


def without(tree: Tree, *path: str) -> None:
    for key in path[:-1]:
        tree = tree[key]
    del tree[path[-1]]


def flavour(tree: Tree, index: int, resource: str, quota: str) -> None:
    for each in tree["spec"]["resourceGroups"][0]["flavors"][index]["resources"]:
        if each["name"] == resource:
            each["nominalQuota"] = quota


def covered_no_more(tree: Tree, resource: str) -> None:
    (group,) = tree["spec"]["resourceGroups"]
    for each in group["flavors"]:
        each["resources"] = [one for one in each["resources"] if one["name"] != resource]


def anywhere_for(tree: Tree, grace: int) -> None:
    """Allow the pod on any node, with a grace period of ``grace`` seconds."""
    del node(tree)["nodeSelector"]
    node(tree)["terminationGracePeriodSeconds"] = grace


def gpu_metric(tree: Tree, kind: str) -> None:
    metric = {"metric": {"name": "DCGM_FI_DEV_GPU_UTIL"}, "target": {"type": "AverageValue", "averageValue": "60"}}
    tree["spec"]["metrics"] = [{"type": kind, kind.lower(): metric}]


GPU_SPOT = ("NodePool", "slipstream-gpu-spot")
ANSWERED = {"url": "http://slipstream-triton.slipstream-serving.svc:8002/metrics", "valueLocation": "waiting"}
DEDICATED = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}
FLAWS: list[tuple[str, tuple[str, ...], Callable[[Tree], None], str]] = [
    ("a taint", GPU_SPOT, lambda t: node(t)["taints"].append(DEDICATED), "tolerates its taint dedicated=ml:NoSchedule"),
    (
        "a taint of GPUs on nodes without",
        ("NodePool", "slipstream-cpu-on-demand"),
        lambda t: put(node(t), "taints", [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]),
        "tolerates its taint nvidia.com/gpu:NoSchedule",
    ),
    (
        "another effect",
        ("ResourceFlavor", "slipstream-gpu-spot"),
        lambda t: put(t, "spec", "nodeTaints", [{"key": "nvidia.com/gpu", "effect": "NoExecute"}]),
        "tolerates its taint nvidia.com/gpu:NoExecute",
    ),
    (
        "a quota of GPUs",
        ("ResourceQuota",),
        lambda t: put(t, "spec", "hard", "requests.nvidia.com/gpu", "8"),
        "requests.nvidia.com/gpu 8 is below the 16 that train asks for",
    ),
    (
        "a quota of memory",
        ("ResourceQuota",),
        lambda t: put(t, "spec", "hard", "limits.memory", "64Gi"),
        "limits.memory 64Gi is below the 2000Gi that train asks for",
    ),
    (
        "a queue's quota",
        ("ClusterQueue", "slipstream-research"),
        lambda t: flavour(t, 2, "nvidia.com/gpu", "15"),
        "nvidia.com/gpu 15 is below the 16 that train asks for",
    ),
    (
        "a resource that a queue does not cover",
        ("ClusterQueue", "slipstream-production"),
        lambda t: covered_no_more(t, "ephemeral-storage"),
        "ephemeral-storage 0 is below the 1040Gi that train asks for",
    ),
    (
        "the most of Volcano's queue",
        ("Queue", "slipstream-production"),
        lambda t: put(t, "spec", "capability", "cpu", 100),
        "cpu 100 is below the 176 that train asks for",
    ),
    (
        "the limit of a pool",
        GPU_SPOT,
        lambda t: put(t, "spec", "limits", "nvidia.com/gpu", "8"),
        "nvidia.com/gpu 8 is below the 16 that train asks for",
    ),
    (
        "a key without requests.",
        ("ResourceQuota",),
        lambda t: put(t, "spec", "hard", {"nvidia.com/gpu": "32"}),
        "the key nvidia.com/gpu does not start with requests.",
    ),
    (
        "a key with limits.",
        ("ResourceQuota",),
        lambda t: put(t, "spec", "hard", {"limits.nvidia.com/gpu": "32"}),
        "the key limits.nvidia.com/gpu does not start with requests.",
    ),
    (
        "a pool's grace",
        GPU_SPOT,
        lambda t: put(node(t), "terminationGracePeriod", "1h"),
        "terminationGracePeriod 3600 s is longer than the 120 s",
    ),
    (
        "a pod's grace",
        ("Deployment",),
        lambda t: anywhere_for(t, 300),
        "terminationGracePeriodSeconds 300 s is longer than the 120 s",
    ),
    (
        "consolidation",
        GPU_SPOT,
        lambda t: put(t, "spec", "disruption", "consolidationPolicy", "WhenEmptyOrUnderutilized"),
        "consolidationPolicy is WhenEmptyOrUnderutilized",
    ),
    (
        "consolidation by default",
        ("NodePool", "slipstream-cpu-on-demand"),
        lambda t: without(t, "spec", "disruption"),
        "consolidationPolicy is not set, and WhenEmptyOrUnderutilized by default",
    ),
    (
        "none",
        ("ScaledObject",),
        lambda t: put(t, "spec", "minReplicaCount", 0),
        "minReplicaCount 0 with a trigger from the replicas' own metrics",
    ),
    (
        "none by default",
        ("ScaledObject",),
        lambda t: without(t, "spec", "minReplicaCount"),
        "minReplicaCount is not set, which is 0 with a trigger from the replicas' own metrics",
    ),
    (
        "none when idle, by CPUs",
        ("ScaledObject",),
        lambda t: t["spec"].update(idleReplicaCount=0, triggers=[{"type": "cpu", "metadata": {"value": "60"}}]),
        "idleReplicaCount 0 with a trigger from the replicas' own metrics",
    ),
    (
        "none, by what the replicas answer",
        ("ScaledObject",),
        lambda t: t["spec"].update(minReplicaCount=0, triggers=[{"type": "metrics-api", "metadata": ANSWERED}]),
        "minReplicaCount 0 with a trigger from the replicas' own metrics",
    ),
    (
        "GPUs by metrics-server",
        ("HorizontalPodAutoscaler",),
        lambda t: put(t["spec"]["metrics"][0], "resource", "name", "nvidia.com/gpu"),
        "it scales by nvidia.com/gpu, and metrics-server knows cpu and memory only",
    ),
    (
        "GPUs without an adapter",
        ("HorizontalPodAutoscaler",),
        lambda t: gpu_metric(t, "Pods"),
        "it scales by DCGM_FI_DEV_GPU_UTIL, and nothing here serves custom.metrics.k8s.io",
    ),
]


def flawed(which: tuple[str, ...], flaw: Callable[[Tree], object]) -> list[Tree]:
    """All of our own, the first that is meant with the flaw."""
    trees = [copy.deepcopy(tree) for tree in objects(PROFILE, keda=which[0] == "ScaledObject")]
    kind, *names = which
    meant = next(tree for tree in trees if tree["kind"] == kind and (not names or tree["metadata"]["name"] in names))
    flaw(meant)
    return trees


@pytest.mark.parametrize(("which", "flaw", "said"), [flaw[1:] for flaw in FLAWS], ids=[flaw[0] for flaw in FLAWS])
def test_a_flaw_is_found_as_itself_alone(which: tuple[str, ...], flaw: Callable[[Tree], None], said: str) -> None:
    (finding,) = found(flawed(which, flaw))
    assert said in finding.what and which[0] in finding.where and finding.where.startswith("file.yaml: ")
    assert finding.consequence and finding.fix
    may_do_otherwise = which[0] in ("NodePool", "ResourceFlavor") and ("taint" in said or "below" in said)
    assert finding.severity == ("warning" if may_do_otherwise or "serves custom" in said else "error")


def test_pods_that_find_no_nodes_at_all_are_an_error() -> None:
    trees = [copy.deepcopy(tree) for tree in objects(PROFILE)]
    for tree in trees:
        if tree["kind"] == "NodePool" and "gpu" in tree["metadata"]["name"]:
            node(tree)["taints"].append(DEDICATED)
    assert [(finding.severity, finding.consequence) for finding in found(trees)] == [
        ("error", "none is placed on these nodes, and all wait as Pending")
    ] * 2


# What looks like a flaw and is none


def test_what_is_no_flaw_is_not_found() -> None:
    pool = copy.deepcopy(named(PROFILE, *GPU_SPOT))
    node(pool)["taints"].append({**DEDICATED, "effect": "PreferNoSchedule"})
    static = copy.deepcopy(named("h100-efa-spot", "NodePool", "slipstream-gpu-spot"))
    del static["spec"]["disruption"]
    assert not found([pool]) and not found([static], "h100-efa-spot")
    other = copy.deepcopy(named(PROFILE, "Deployment"))
    node(other)["terminationGracePeriodSeconds"] = 3600  # on-demand machines are not preempted
    assert not found([pool, other])
    unsaid = copy.deepcopy(pool)  # without a capacity type, Karpenter buys on demand
    node(unsaid)["requirements"] = [r for r in node(unsaid)["requirements"] if "capacity-type" not in r["key"]]
    node(unsaid)["terminationGracePeriod"] = "24h"
    assert not found([unsaid])


def test_what_others_call_the_same_is_not_meant() -> None:
    for kind, name in (("Queue", "slipstream-production"), GPU_SPOT):
        tree = copy.deepcopy(named(PROFILE, kind, name))
        tree["spec"] |= {"capability": {"cpu": "1"}, "limits": {"cpu": "1", "nvidia.com/gpu": "1"}, "disruption": {}}
        assert found([tree])
        tree["apiVersion"] = "example.com/v1"
        assert not found([tree])


def test_of_what_is_too_little_devices_are_named_first() -> None:
    quota = next(copy.deepcopy(tree) for tree in objects(PROFILE) if tree["kind"] == "ResourceQuota")
    quota["spec"]["hard"] |= {"requests.cpu": "1", "requests.nvidia.com/gpu": "1"}
    (finding,) = found([quota])
    same_wording(finding.what)


def test_a_quota_of_a_namespace_that_is_not_flytes_is_not_the_profiles() -> None:
    quota = next(copy.deepcopy(tree) for tree in objects(PROFILE) if tree["kind"] == "ResourceQuota")
    quota["spec"]["hard"] = {"requests.nvidia.com/gpu": "1", "count/jobs.batch": "5"}
    assert found([quota])
    quota["metadata"]["namespace"] = "somebody-else"
    assert not found([quota])


def test_a_trigger_from_elsewhere_wakes_and_an_adapter_serves() -> None:
    scaled = copy.deepcopy(named(PROFILE, "ScaledObject", keda=True))
    scaled["spec"]["minReplicaCount"] = 0
    query = "sum(rate(nginx_ingress_controller_requests[1m]))"
    scaled["spec"]["triggers"].append({"type": "prometheus", "metadata": {"query": query}})
    assert not found([scaled])
    autoscaler = copy.deepcopy(named(PROFILE, "HorizontalPodAutoscaler"))
    gpu_metric(autoscaler, "Pods")
    assert found([autoscaler])
    assert not found([autoscaler, {"kind": "APIService", "spec": {"group": "custom.metrics.k8s.io"}}])


def test_a_plain_pod_or_template_has_a_grace_too() -> None:
    spec = {"terminationGracePeriodSeconds": 60}
    for tree in ({"kind": "Pod", "spec": spec}, {"kind": "PodTemplate", "template": {"spec": spec}}):
        assert [finding.where for finding in found([tree], "l4-spot")] == [f"file.yaml: {tree['kind']} ?"]


def test_times_are_read_as_kubernetes_writes_them() -> None:
    assert [parse_duration(text) for text in (30, "90s", "5m", "1h30m", "Never", None)] == [30, 90, 300, 5400, 0, 0]
    assert [parse_duration(odd) for odd in ("²s", 10**400, "9" * 5_000 + "s")] == [0, math.inf, math.inf]


ODD: tuple[Any, ...] = (None, "text", [None], 10**400, "²s", "9" * 5_000 + "s")
LOOKED_AT = {
    "ClusterQueue",
    "Deployment",
    "HorizontalPodAutoscaler",
    "NodePool",
    "Queue",
    "ResourceQuota",
    "ScaledObject",
}


@pytest.mark.prove
def test_an_odd_shape_anywhere_is_passed_over() -> None:
    trees = [*objects(PROFILE, keda=True), named(PROFILE, "HorizontalPodAutoscaler")]
    tried = 0
    for tree in {tree["kind"]: tree for tree in trees if tree["kind"] in LOOKED_AT}.values():
        for path in every_path(tree):
            for odd in ODD:
                broken = copy.deepcopy(tree)
                put(broken, *path, odd)
                if isinstance(broken["kind"], str):
                    found([broken])
                    tried += 1
    assert tried > 800


def every_path(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [each for key, value in pairs for each in ((*path, key), *every_path(value, (*path, key)))]


# The command


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_manifests(list(files(PROFILE)), tmp_path / "cluster")
    return tmp_path / "cluster"


def test_it_reads_a_directory_and_exits_with_1_only_if_something_will_fail(directory: Path) -> None:
    well = doctor(directory, "--profile", PROFILE)
    assert well.exit_code == 0 and well.output.endswith("\nnothing found\n")
    quota = directory / "40-quota.yaml"
    quota.write_text(quota.read_text().replace("requests.nvidia.com/gpu", "nvidia.com/gpu"))
    ill = doctor(directory, "--profile", PROFILE)
    assert ill.exit_code == 1
    same_wording(ill.output)
    assert ill.output.endswith("\n1 error\n")


def test_a_list_is_its_items(tmp_path: Path) -> None:
    quota = copy.deepcopy(next(tree for tree in objects(PROFILE) if tree["kind"] == "ResourceQuota"))
    quota["spec"]["hard"] = {"nvidia.com/gpu": "32"}
    (tmp_path / "all.yml").write_text(yaml.safe_dump({"kind": "List", "items": [quota]}))
    assert doctor(tmp_path, "--profile", PROFILE).exit_code == 1


@pytest.mark.parametrize("items", [5, None, "text", {"kind": "Pod"}, [5, None, {"kind": 5}]])
def test_a_list_of_odd_items_is_passed_over(tmp_path: Path, items: object) -> None:
    pod = {"kind": "Pod", "metadata": {"name": "own"}}
    (tmp_path / "all.yml").write_text(yaml.safe_dump_all([{"kind": "List", "items": items}, pod]))
    assert [each.where for each in read_manifests(tmp_path)] == ["all.yml: Pod own"]


def test_what_is_no_directory_of_manifests_is_one_line(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/a.yaml").write_text("kind: [\n")
    lines = {
        (tmp_path / "absent", "--profile", PROFILE): "no directory of manifests",
        (tmp_path / "empty", "--profile", PROFILE): "no manifests; expected a directory such as",
        (tmp_path / "bad", "--profile", PROFILE): "bad/a.yaml, line 2: not valid YAML",
        (directory, "--profile", "nothing"): "no such profile; choose one of",
        (directory,): "is a directory; expected --profile",
        (directory, "--profile", PROFILE, "--limits", "x.toml"): "remove --limits and --trained",
        ("--node", "--profile", PROFILE): "remove PACKAGE, --limits, --trained and --profile",
    }
    for arguments, said in lines.items():
        ended = doctor(*arguments)
        assert ended.exit_code == 1 and said in ended.output and ended.output.count("\n") == 1, ended.output
