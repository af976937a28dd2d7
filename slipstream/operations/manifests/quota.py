"""Namespaces of Flyte's domains, and the resource quota of all their pods."""

from __future__ import annotations

from slipstream.operations.manifests.documents import KubernetesObject, ManifestFile, kubernetes_object
from slipstream.operations.manifests.queues import SERVING, queue_name
from slipstream.operations.manifests.site import DOMAINS, PRODUCTION, RESEARCH, ClusterSite
from slipstream.shared.profiles.needs import at_once, format_quantity

OPERATOR_NAMESPACE = "gpu-operator"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


def namespaces_file(site: ClusterSite, serve: bool, operator: bool) -> ManifestFile:
    documents = []
    for queue in (PRODUCTION, RESEARCH):
        tree = kubernetes_object("v1", "Namespace", site.namespace(queue))
        tree["metadata"]["annotations"] = {VOLCANO_QUEUE: queue_name(queue)}
        text = f"Flyte creates it for its domain {DOMAINS[queue]} if it does not exist. Volcano reads the annotation."
        documents.append(KubernetesObject(text, tree))
    if operator:
        tree = kubernetes_object("v1", "Namespace", OPERATOR_NAMESPACE)
        tree["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "privileged"
        documents.append(KubernetesObject("Namespace of the GPU operator's chart, whose pods are privileged.", tree))
    if serve:
        documents.append(
            KubernetesObject("Namespace of the served models.", kubernetes_object("v1", "Namespace", SERVING))
        )
    return ManifestFile("00-namespaces.yaml", "namespaces of the other objects", tuple(documents))


def resource_quota_file(site: ClusterSite) -> ManifestFile:
    """Return one resource quota per domain, each with the sum of both queues' quotas.

    Kueue admits jobs on quota that the other queue lends, and a lower quota would refuse their pods.
    """
    hard = {
        f"requests.{name}": format_quantity(name, len(DOMAINS) * amount)
        for name, amount in at_once(site.stages).items()
    }
    text = (
        "Twice the requests of one main job at a time: a domain may use resources that the other's queue lends it. "
        "For devices, Kubernetes supports only keys that start with requests. It rejects pods without requests for "
        "CPU and memory; Flyte's pods have them."
    )
    documents = [
        KubernetesObject(
            text, kubernetes_object("v1", "ResourceQuota", "slipstream", site.namespace(queue), spec={"hard": hard})
        )
        for queue in (PRODUCTION, RESEARCH)
    ]
    return ManifestFile("40-quota.yaml", "ResourceQuota of Flyte's namespaces", tuple(documents))
