"""Every manifest fits its schema, and fails with any misspelt key or without any required one."""

import copy
import json
from typing import Any

import pytest
import yaml

from tests.support.kube_schemas import CRDS, errors, errors_by_version, is_core, keys, mutated
from tests.support.proving import first_few
from tests.support.written_manifests import PROFILES, files, objects, trees

needs_definitions = pytest.mark.skipif(not CRDS.is_dir(), reason="no published definitions next to this checkout")
#: Maps with free keys or names of resources, where a schema cannot find a misspelt key.
FREE = {
    *("labels", "annotations", "matchLabels", "nodeSelector", "nodeLabels", "requests", "limits", "hard", "data"),
    *("selector", "tags", "deserved", "capability", "metadata"),
}
OTHERS = {"ClusterQueue", "EC2NodeClass", "LocalQueue", "NodePool", "Queue", "ResourceFlavor", "ScaledObject"}
OWN = {"ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Namespace", "PodDisruptionBudget", "PriorityClass"}


@pytest.mark.parametrize("keda", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
def test_kubernetes_takes_its_own_objects(profile: str, keda: bool) -> None:
    found = [tree for tree in objects(profile, keda) if is_core(tree["apiVersion"])]
    assert len({tree["kind"] for tree in found}) >= 7
    assert not [(tree["kind"], error) for tree in found for error in errors_by_version(json.dumps(tree))]


@needs_definitions
@pytest.mark.parametrize("profile", PROFILES)
def test_the_definitions_take_the_others(profile: str) -> None:
    found = [tree for tree in objects(profile, True) if not is_core(tree["apiVersion"])]
    assert {tree["kind"] for tree in found} >= {"ClusterQueue", "LocalQueue", "Queue", "ResourceFlavor", "ScaledObject"}
    assert not [(tree["kind"], tree["metadata"]["name"], error) for tree in found for error in errors(tree)]


def shapes(own: bool) -> list[dict[str, Any]]:
    """Of all profiles' objects one of each shape: kind and keys."""
    found: dict[str, dict[str, Any]] = {}
    for profile in PROFILES:
        for tree in (*objects(profile), *objects(profile, keda=True)):
            if is_core(tree["apiVersion"]) is own:
                found.setdefault(f"{tree['kind']} {sorted(paths(tree))}", tree)
    return list(found.values())


def paths(tree: Any, path: str = "") -> set[str]:
    """The keys without the numbers of lists."""
    if isinstance(tree, list):
        return {each for item in tree for each in paths(item, f"{path}[]")}
    if not isinstance(tree, dict):
        return set()
    return {each for key, value in tree.items() for each in {f"{path}.{key}", *paths(value, f"{path}.{key}")}}


@pytest.mark.parametrize("own", first_few([True, pytest.param(False, marks=needs_definitions)], 1))
def test_a_misspelt_key_is_refused_and_so_is_a_missing_one(own: bool) -> None:
    broken = {"misspelt": 0, "removed": 0}
    for tree in shapes(own):
        assert not errors(tree)
        for path, is_closed, is_required in keys(tree):
            where = f"{tree['kind']} {path}"
            if is_closed:
                assert errors(mutated(tree, path, f"{path[-1]}x")), f"{where} misspelt"
                broken["misspelt"] += 1
            else:
                assert path[-2] in FREE, f"{where}: anything may stand there"
            if is_required:
                assert errors(mutated(tree, path, "")), f"{where} removed"
                broken["removed"] += 1
    assert {tree["kind"] for tree in shapes(own)} >= (OWN if own else OTHERS)
    assert broken["misspelt"] > 200 and broken["removed"] > 30


# The chart's values


def strange(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Keys that the chart does not know, and values of another type than its own; empty maps of its are the user's."""
    if not isinstance(ours, dict) or theirs == {}:
        return [] if type(ours) is type(theirs) else [f"{path}: {type(ours).__name__}"]
    found = [f"{path}.{key}" for key in ours if key not in theirs]
    return [
        *found,
        *(each for key in ours if key in theirs for each in strange(ours[key], theirs[key], f"{path}.{key}")),
    ]


@needs_definitions
@pytest.mark.parametrize("profile", ["a100-mig", "a100-spot", "h100-efa-spot", "t4-shared"])
def test_the_chart_of_the_gpu_operator_knows_the_values(profile: str) -> None:
    theirs = yaml.safe_load((CRDS / "gpu-operator-values.yaml").read_text(encoding="utf-8"))
    (file,) = [file for file in files(profile) if file.path.startswith("helm/")]
    (ours,) = trees(file)
    assert not strange(ours, theirs)
    every = [path for path in dict_paths(ours) if "additionalLabels" not in path[:-1]]
    assert len(every) > 10
    assert not [path for path in every if not strange(mutated(ours, path, f"{path[-1]}x"), theirs)]


@needs_definitions
@pytest.mark.parametrize("profile", ["a100-mig", "a100-spot", "h100-efa-spot", "t4-shared"])
def test_what_the_chart_makes_of_them_is_a_cluster_policy(profile: str) -> None:
    (file,) = [file for file in files(profile) if file.path.startswith("helm/")]
    (values,) = trees(file)
    asked = {name: value for name, value in copy.deepcopy(values).items() if name != "node-feature-discovery"}
    for section in asked.values():
        section.get("config", {}).pop("create", None)  # the chart's own
    required = ("operator", "driver", "toolkit", "devicePlugin", "dcgm", "dcgmExporter", "daemonsets", "gfd")
    spec = {
        **{name: {} for name in (*required, "nodeStatusExporter")},
        "operator": {"defaultRuntime": "containerd"},
        **asked,
    }
    policy = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "mine"}, "spec": spec}
    assert not errors(policy)
    closed = [
        path for path, is_closed, _ in keys(policy) if is_closed and path[0] == "spec" and path[1:2] != ("operator",)
    ]
    assert len(closed) > 10 and all(errors(mutated(policy, path, f"{path[-1]}x")) for path in closed)


def dict_paths(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return []
    return [each for key, value in tree.items() for each in ((*path, key), *dict_paths(value, (*path, key)))]
