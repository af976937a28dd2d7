"""Autoscalers that never act: their metrics need running replicas, or have no API that serves them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slipstream.operations.doctor.findings import Finding
from slipstream.operations.doctor.objects import KubernetesManifest

#: Prefixes of metrics that only running replicas, their containers or their GPUs export.
OWN_METRICS = ("nv_", "triton_", "DCGM_", "container_", "slipstream_")
GPU = re.compile("gpu|dcgm", re.IGNORECASE)
#: API that serves a type of HPA metric. ``Resource`` metrics come from metrics-server, which has CPU and memory only.
APIS = {"Pods": "custom.metrics.k8s.io", "Object": "custom.metrics.k8s.io", "External": "external.metrics.k8s.io"}
RESOURCES = ("cpu", "memory")


def check_scaled_object(manifest: KubernetesManifest) -> Iterator[Finding]:
    """Yield KEDA objects that cannot start the first replica.

    With zero replicas, metrics that replicas export are missing, so nothing starts one (keda#6040).
    """
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
