"""NVIDIA's GPU operator: chart values, GPU sharing (time slicing, MPS) and partitions (MIG)."""

from __future__ import annotations

from slipstream.operations.manifests.documents import KubernetesObject, ManifestFile, Tree, kubernetes_object, yaml_text
from slipstream.operations.manifests.partitions import find_partition
from slipstream.operations.manifests.pools import MIG_LABEL, SHARING_LABEL, mig_config, node_pools
from slipstream.operations.manifests.quota import OPERATOR_NAMESPACE
from slipstream.operations.manifests.site import ClusterSite
from slipstream.shared.profiles.placement import Placement

VALUES = "helm/gpu-operator.yaml"
SHARING, MIG = "slipstream-sharing", "slipstream-mig"
#: Number of pods that share a GPU; profiles have no setting for it.
SHARES = 4
#: Clouds whose node images include driver and container toolkit.
BRING_DRIVER = ("aws", "azure")
#: Labels by which kube-prometheus-stack finds monitors, as in monitoring/podmonitor.yaml.
MONITOR_LABELS = {"release": "prometheus"}


def gpu_operator(site: ClusterSite) -> list[ManifestFile]:
    """Return the files of the GPU operator.

    Empty without NVIDIA's GPUs, and on GKE, which brings driver, device plugin and DCGM itself.
    """
    if not site.nvidia or site.cloud == "gcp":
        return []
    files = []
    if shared := [placement for placement in site.gpus.values() if placement.shared_gpu]:
        text = "device-plugin sharing of a GPU by several pods"
        files.append(ManifestFile("50-gpu-sharing.yaml", text, (sharing(shared),)))
    if divided := [placement for placement in site.gpus.values() if placement.mig]:
        files.append(ManifestFile("50-gpu-partitions.yaml", "MIG configuration of a GPU", (partitions(divided),)))
    values = KubernetesObject(values_text(bool(shared), bool(divided)), chart_values(site, shared, divided))
    return [*files, ManifestFile(VALUES, "values of the GPU operator's chart, with DCGM's ServiceMonitor", (values,))]


# Sharing of a GPU


def sharing(shared: list[Placement]) -> KubernetesObject:
    data = {"none": yaml_text({"version": "v1"})}
    data |= {placement.shared_gpu: yaml_text(sharing_of(placement)) for placement in shared}
    text = (
        f"Nodes with the label {SHARING_LABEL} share every GPU among {SHARES} pods; other nodes are unchanged. Time "
        "slicing does not isolate memory; MPS limits it per pod."
    )
    return KubernetesObject(text, kubernetes_object("v1", "ConfigMap", SHARING, OPERATOR_NAMESPACE, data=data))


def sharing_of(placement: Placement) -> Tree:
    renamed = placement.gpu_name.endswith(".shared")
    whole = placement.gpu_name.removesuffix(".shared")
    entry: Tree = {"renameByDefault": renamed}
    if placement.shared_gpu == "time-slicing":
        # Two shares of a GPU are no more of it than one.
        entry["failRequestsGreaterThanOne"] = True
    entry["resources"] = [{"name": whole, "replicas": SHARES}]
    kind = "timeSlicing" if placement.shared_gpu == "time-slicing" else "mps"
    strategy = {"flags": {"migStrategy": placement.mig_strategy}} if placement.mig else {}
    return {"version": "v1", **strategy, "sharing": {kind: entry}}


# Partitions of a GPU


def partitions(divided: list[Placement]) -> KubernetesObject:
    configs: Tree = {"all-disabled": [{"devices": "all", "mig-enabled": False}]}
    for placement in divided:
        devices = {placement.mig: find_partition(placement.mig).number}
        configs[mig_config(placement)] = [{"devices": "all", "mig-enabled": True, "mig-devices": devices}]
    data = {"config.yaml": yaml_text({"version": "v1", "mig-configs": configs})}
    text = (
        f"Nodes with the label {MIG_LABEL} partition all of their GPUs as in the entry of that name; GPUs of other "
        "nodes are not partitioned. No process may use a GPU while it is partitioned."
    )
    return KubernetesObject(text, kubernetes_object("v1", "ConfigMap", MIG, OPERATOR_NAMESPACE, data=data))


# Chart


def chart_values(site: ClusterSite, shared: list[Placement], divided: list[Placement]) -> Tree:
    """Return the values that differ from the chart's defaults, or must not follow changes of the defaults."""
    brings = site.cloud in BRING_DRIVER
    strategies = {placement.mig_strategy for placement in divided}
    tolerations = [tolerance(taint) for taint in taints(site)]
    values: Tree = {
        "driver": {"enabled": not brings},
        "toolkit": {"enabled": not brings},
        "mig": {"strategy": "mixed" if "mixed" in strategies else "single"},
        "migManager": {"enabled": bool(divided)},
        "dcgmExporter": {
            "enabled": True,
            "serviceMonitor": {"enabled": True, "interval": "15s", "additionalLabels": dict(MONITOR_LABELS)},
        },
    }
    if tolerations:
        control_plane = {"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}
        values["daemonsets"] = {"tolerations": tolerations}
        values["node-feature-discovery"] = {"worker": {"tolerations": [control_plane, *tolerations]}}
    if shared:
        values["devicePlugin"] = {"config": {"create": False, "name": SHARING, "default": "none"}}
    if divided:
        config = {"create": False, "name": MIG, "default": "all-disabled"}
        values["migManager"] |= {"config": config, "env": [{"name": "WITH_REBOOT", "value": "true"}]}
    return values


def values_text(shared: bool, divided: bool) -> str:
    text = (
        "helm upgrade --install gpu-operator nvidia/gpu-operator --namespace gpu-operator --values THIS. Its pods "
        "tolerate the taints of the nodes; otherwise the GPUs would not be registered. monitoring/alerts.yaml uses "
        "DCGM's metrics. "
    )
    if shared:
        text += f"The ConfigMap {SHARING} configures GPU sharing. "
    if divided:
        text += f"The ConfigMap {MIG} configures the partitions; clouds do not allow a GPU reset, so the node reboots. "
    return text


def taints(site: ClusterSite) -> list[Tree]:
    found: list[Tree] = []
    for pool in node_pools(site):
        found += [taint for taint in pool.taints if pool.has_gpus and taint not in found]
    return found


def tolerance(taint: Tree) -> Tree:
    operator = {"operator": "Equal"} if "value" in taint else {"operator": "Exists"}
    return {"key": taint["key"], **operator, **{name: taint[name] for name in ("value", "effect") if name in taint}}
