"""Model in service: Triton's Deployment and Service, its autoscaler and its disruption budget."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.operations.manifests.documents import KubernetesObject, ManifestFile, Tree, kubernetes_object
from slipstream.operations.manifests.pools import CAPACITY_LABEL, ON_DEMAND, about_spot
from slipstream.operations.manifests.queues import SERVING
from slipstream.operations.manifests.site import ClusterSite
from slipstream.shared.profiles.needs import NOTICE_S
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.settings import to_dict

NAME = "slipstream-triton"
IMAGE = "nvcr.io/nvidia/tritonserver:25.08-py3"
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
#: Minimum replicas, two so that losing one is harmless, and maximum replicas, which bound the cost.
REPLICAS, MOST_REPLICAS = 2, 8
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
#: Maximum seconds from SIGTERM to SIGKILL; and seconds that a pod still answers until routing to it stops.
GRACE_S, DRAIN_S = 30, 5
CPU_BUSY_PERCENT = 70
#: Queueing time per computing time to aim at; with constant computing times a replica is then busy two thirds of
#: the time.
WAITING_PER_COMPUTING = "1"
LABELS = {"app.kubernetes.io/name": NAME}


@dataclass(frozen=True)
class TritonService:
    #: Address of Triton's model repository, as ``slipstream triton`` writes it.
    models: str
    #: True to scale by Triton's queue with KEDA, False to scale by the pods' CPU use.
    keda: bool


def triton_file(site: ClusterSite, serving: TritonService) -> ManifestFile:
    # Variants were timed on this placement, so the model card's figures hold for such pods.
    placement = site.profile.asked("export")
    keda = needs_keda(site, serving)
    scaler = scaled_object() if keda else autoscaler()
    needs = " (needs KEDA and monitoring/podmonitor-triton.yaml)" if keda else ""
    account = KubernetesObject(
        "Account that reads the model repository: annotate it with a role of the cloud (on EKS "
        "eks.amazonaws.com/role-arn).",
        kubernetes_object("v1", "ServiceAccount", NAME, SERVING),
    )
    documents = (account, deployment(site, placement, serving), service(), scaler, budget())
    return ManifestFile("60-triton.yaml", f"the served model: Triton and its autoscaler{needs}", documents)


def needs_keda(site: ClusterSite, serving: TritonService) -> bool:
    """Return True if KEDA scales: on request, and for GPU pods, whose load does not show in CPU use."""
    return serving.keda or bool(int(site.profile.asked("export").gpu))


def deployment(site: ClusterSite, placement: Placement, serving: TritonService) -> KubernetesObject:
    grace = min(GRACE_S, NOTICE_S.get(site.cloud, GRACE_S))
    pod: Tree = {
        "serviceAccountName": NAME,
        "priorityClassName": SERVING,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": LABELS},
            }
        ],
        "containers": [container(placement, serving, grace)],
    }
    if selector := node_selector(site, placement):
        pod["nodeSelector"] = selector
    tolerated = [each for each in placement.tolerations if not about_spot(each.key, each.value)]
    if tolerated:
        pod["tolerations"] = [{name: value for name, value in to_dict(each).items() if value} for each in tolerated]
    spec = {
        "selector": {"matchLabels": LABELS},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": LABELS}, "spec": pod},
    }
    text = (
        "Its pods request the resources of the stage export, where the variants were timed, on on-demand capacity. "
        "After SIGTERM they have time to answer requests in progress. The autoscaler sets the replicas. The image "
        "was not tested: choose one whose ONNX Runtime supports the model's opset (slipstream check shows it)."
    )
    return KubernetesObject(text, kubernetes_object("apps/v1", "Deployment", NAME, SERVING, spec=spec))


def node_selector(site: ClusterSite, placement: Placement) -> dict[str, str]:
    on_demand = {CAPACITY_LABEL: ON_DEMAND} if site.cloud == "aws" else {}
    own = {key: value for key, value in placement.node_selector.items() if not about_spot(key, value)}
    return own | on_demand


def container(placement: Placement, serving: TritonService, grace: int) -> Tree:
    return {
        "name": "triton",
        "image": IMAGE,
        "args": [
            "tritonserver",
            f"--model-repository={serving.models}",
            f"--exit-timeout-secs={grace - DRAIN_S}",
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "resources": {"requests": dict(placement.resources), "limits": dict(placement.resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_S)]}}},
        "startupProbe": {**probe("ready"), "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**probe("ready"), "periodSeconds": 5},
        "livenessProbe": {**probe("live"), "periodSeconds": 10},
    }


def probe(what: str) -> Tree:
    return {"httpGet": {"path": f"/v2/health/{what}", "port": "http"}}


def service() -> KubernetesObject:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in PORTS.items()]
    text = (
        "Connections are balanced, not requests: gRPC clients with one long-lived connection need a mesh, or several "
        "connections."
    )
    return KubernetesObject(
        text, kubernetes_object("v1", "Service", NAME, SERVING, spec={"selector": LABELS, "ports": ports})
    )


def budget() -> KubernetesObject:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": LABELS}}
    text = "Nodes are drained one pod at a time. A minimum would block the drain of a node with the only replica."
    return KubernetesObject(text, kubernetes_object("policy/v1", "PodDisruptionBudget", NAME, SERVING, spec=spec))


# Autoscalers


def autoscaler() -> KubernetesObject:
    utilisation = {"type": "Utilization", "averageUtilization": CPU_BUSY_PERCENT}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME},
        "minReplicas": REPLICAS,
        "maxReplicas": MOST_REPLICAS,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": utilisation}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    text = "Scales by the pods' CPU use from metrics-server: config.pbtxt runs models on CPUs."
    return KubernetesObject(
        text, kubernetes_object("autoscaling/v2", "HorizontalPodAutoscaler", NAME, SERVING, spec=spec)
    )


def scaled_object() -> KubernetesObject:
    waiting, computing = (
        f'sum(rate(nv_inference_{part}_duration_us{{namespace="{SERVING}"}}[2m]))'
        for part in ("queue", "compute_infer")
    )
    trigger = {
        "type": "prometheus",
        "metricType": "Value",
        "metadata": {
            "serverAddress": PROMETHEUS,
            "query": f"{waiting} / clamp_min({computing}, 1)",
            "threshold": WAITING_PER_COMPUTING,
            "ignoreNullValues": "false",
        },
    }
    spec = {
        "scaleTargetRef": {"name": NAME},
        "minReplicaCount": REPLICAS,
        "maxReplicaCount": MOST_REPLICAS,
        "cooldownPeriod": 300,
        "triggers": [trigger],
    }
    text = (
        "Scales by the queue time per second of computing. The minimum is not 0: the replicas themselves report the "
        "metric, so nothing would start the first one. A missing metric is an error, not 0: the number of replicas "
        "stays unchanged."
    )
    return KubernetesObject(text, kubernetes_object("keda.sh/v1alpha1", "ScaledObject", NAME, SERVING, spec=spec))
