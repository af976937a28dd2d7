"""Manifests: the Kubernetes objects in a directory's YAML files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.operations.doctor.findings import Finding
from slipstream.shared.errors import UserError

#: API groups of the checked kinds, as other groups use the same kind names.
GROUPS = {
    "ClusterQueue": "kueue.x-k8s.io",
    "NodePool": "karpenter.sh",
    "Queue": "scheduling.volcano.sh",
    "ResourceFlavor": "kueue.x-k8s.io",
    "ScaledObject": "keda.sh",
}


@dataclass(frozen=True, eq=False)
class KubernetesManifest:
    """Kubernetes object with the path of its file in the directory."""

    file: str
    tree: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Kind; with the API group if that is not the expected one."""
        kind, group = str(self.tree["kind"]), str(self.tree.get("apiVersion")).partition("/")[0]
        return kind if GROUPS.get(kind, group) == group else f"{kind} of {group}"

    @property
    def where(self) -> str:
        return f"{self.file}: {self.kind} {self.at('metadata', 'name') or '?'}"

    def at(self, *path: str) -> Any:
        """Return the value at a path of keys; None if missing."""
        found: Any = self.tree
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def mapping(self, *path: str) -> Mapping[str, Any]:
        found = self.at(*path)
        return found if isinstance(found, Mapping) else {}

    def listed(self, *path: str) -> list[Mapping[str, Any]]:
        return mappings_in(self.at(*path))


def mappings_in(found: object) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def read_manifests(directory: Path) -> list[KubernetesManifest]:
    """Return all objects below a directory.

    Raises ``UserError`` if there are none, or a file is not YAML.
    """
    paths = sorted(path for path in directory.rglob("*") if path.suffix in (".yaml", ".yml") and path.is_file())
    found = [manifest for path in paths for manifest in read_file(path, path.relative_to(directory).as_posix())]
    if not found:
        raise UserError(f"{directory}: no manifests; expected a directory such as `slipstream manifests` writes")
    return found


def read_file(path: Path, name: str) -> Iterator[KubernetesManifest]:
    """Yield the objects of a file; documents without a kind, such as a chart's values, are skipped."""
    try:
        trees = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    for tree in trees:
        if isinstance(tree, dict) and tree.get("kind") == "List":
            yield from (KubernetesManifest(name, each) for each in mappings_in(tree.get("items")) if has_kind(each))
        elif has_kind(tree):
            yield KubernetesManifest(name, tree)


def has_kind(tree: object) -> bool:
    return isinstance(tree, dict) and isinstance(tree.get("kind"), str)


#: Prefixes of metrics that only running replicas, their containers or their GPUs export.
OWN_METRICS = ("nv_", "triton_", "DCGM_", "container_", "slipstream_")
GPU = re.compile("gpu|dcgm", re.IGNORECASE)
#: API that serves a type of HPA metric. ``Resource`` metrics come from metrics-server, which has CPU and memory only.
APIS = {"Pods": "custom.metrics.k8s.io", "Object": "custom.metrics.k8s.io", "External": "external.metrics.k8s.io"}
RESOURCES = ("cpu", "memory")


def check_scaled_object(manifest: KubernetesManifest) -> Iterator[Finding]:
    """Yield KEDA objects that cannot start the first replica (keda#6040)."""
    spec, triggers = manifest.mapping("spec"), manifest.listed("spec", "triggers")
    target = str(manifest.at("spec", "scaleTargetRef", "name"))
    none = next((key for key in ("minReplicaCount", "idleReplicaCount") if spec.get(key) == 0), "")
    if "minReplicaCount" not in spec and "idleReplicaCount" not in spec:
        none = "minReplicaCount is not set, which is"
    if manifest.kind != "ScaledObject" or not none or not triggers:
        return
    if all(is_own(trigger, target) for trigger in triggers):
        yield Finding(
            "error",
            manifest.where,
            f"{none} 0 with a trigger from the replicas' own metrics",
            "without a replica there is no such metric: after it has scaled to zero it never scales up",
            "set minReplicaCount to 1, or add a trigger from what sends the requests, as an ingress or a queue",
        )


def is_own(trigger: Mapping[str, Any], target: str) -> bool:
    metadata = trigger.get("metadata")
    if trigger.get("type") in RESOURCES:
        return True
    if not isinstance(metadata, Mapping):
        return False
    read = " ".join(str(metadata.get(key, "")) for key in ("query", "url", "metricName"))
    return target in read or any(word.startswith(OWN_METRICS) for word in re.findall(r"\w+", read))


def check_autoscaler(manifest: KubernetesManifest, served: Collection[str]) -> Iterator[Finding]:
    """Yield HPAs on GPU metrics that no API serves; ``served`` are API groups that the manifests serve."""
    if manifest.kind != "HorizontalPodAutoscaler":
        return
    for metric in manifest.listed("spec", "metrics"):
        api = APIS.get(str(metric.get("type")), "")
        name = metric_name(metric)
        if not GPU.search(name) or api in served:
            continue
        why = f"nothing here serves {api}" if api else "metrics-server knows cpu and memory only"
        yield Finding(
            "warning" if api else "error",
            manifest.where,
            f"it scales by {name}, and {why}",
            "without an adapter it never scales: `kubectl describe hpa` reports the missing metric",
            "install prometheus-adapter with a rule for it, or scale by a Prometheus trigger of KEDA",
        )


def metric_name(metric: Mapping[str, Any]) -> str:
    """Return a metric's name, whatever its type; "" if missing."""
    kind = str(metric.get("type"))
    section = metric.get(kind[:1].lower() + kind[1:])
    if not isinstance(section, Mapping):
        return ""
    inner = section.get("metric")
    return str(section.get("name") or (inner.get("name") if isinstance(inner, Mapping) else "") or "")
