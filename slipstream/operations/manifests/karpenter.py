"""Nodes on EKS: Karpenter's NodePools, on spot and on demand."""

from __future__ import annotations

import math

from slipstream.operations.manifests.documents import KubernetesObject, ManifestFile, Tree, kubernetes_object
from slipstream.operations.manifests.node_class import GROUP, class_name, node_classes
from slipstream.operations.manifests.pools import CAPACITY_LABEL, ON_DEMAND, SPOT, NodePool, node_pools
from slipstream.operations.manifests.site import DOMAINS, ClusterSite
from slipstream.shared.profiles.needs import NOTICE_S, format_quantity
from slipstream.shared.profiles.placement import TYPE_LABEL

#: Weights by which Karpenter orders the pools that a pod tolerates and fits on.
WEIGHTS = {SPOT: 50, ON_DEMAND: 10}
#: Time that an empty node waits for the next stage or attempt.
KEPT_EMPTY = "5m"
#: Domains of labels that nodes have by default: selectors on them become requirements, other selectors node labels.
KNOWN_LABELS = ("kubernetes.io", "k8s.io", "karpenter.sh", GROUP)
WHY = (
    "Karpenter's defaults move pods to fuller nodes, which ends a training: here only empty nodes are removed, not "
    "expired nodes or nodes with an old image. If a pod can use two pools, the pool with the larger weight comes "
    "first. On spot, terminationGracePeriod equals the preemption notice, so that pods with do-not-disrupt get their "
    "SIGTERM within it, not after it; on demand it lets an attempt end when its node is deleted. Karpenter receives "
    "preemption notices from its own queue (settings.interruptionQueue)."
)


def karpenter_files(site: ClusterSite) -> list[ManifestFile]:
    """Return the files of the NodePools; empty if nodes are not Amazon's."""
    if site.cloud != "aws":
        return []
    made = node_pools(site)
    documents = [*node_classes(site, made), *(node_pool(pool) for pool in made)]
    needs = "Karpenter"
    if uncounted(made):
        needs += " with its feature gate StaticCapacity"
    return [ManifestFile("10-karpenter.yaml", f"nodes on spot and on demand (needs {needs})", tuple(documents), WHY)]


def uncounted(made: list[NodePool]) -> list[str]:
    """Return the resources that keep Karpenter from creating nodes by itself."""
    return sorted({name for pool in made for name in pool.uncounted})


def static_pools(site: ClusterSite) -> list[NodePool]:
    """Return the pools whose nodes have to be requested by hand."""
    return [pool for pool in node_pools(site) if pool.uncounted] if site.cloud == "aws" else []


def node_pool(pool: NodePool) -> KubernetesObject:
    spec: Tree = {} if pool.uncounted else {"weight": WEIGHTS[pool.capacity]}
    spec |= {"replicas": 0} if pool.uncounted else {}
    spec |= {
        "limits": limits(pool),
        "disruption": {
            "consolidationPolicy": "WhenEmpty",
            "consolidateAfter": KEPT_EMPTY,
            "budgets": [
                {"nodes": "100%", "reasons": ["Empty"]},
                {"nodes": "0", "reasons": ["Drifted", "Underutilized"]},
            ],
        },
        "template": template(pool),
    }
    return KubernetesObject(why(pool), kubernetes_object("karpenter.sh/v1", "NodePool", pool.name, spec=spec))


def why(pool: NodePool) -> str:
    text = f"For {', '.join(pool.stages)}. "
    if pool.uncounted:
        text += (
            f"Pods request {', '.join(pool.uncounted)}, and Karpenter cannot know that a new node will have it, so it "
            f"does not create nodes. Request nodes with kubectl scale nodepool {pool.name} "
            f"--replicas={pool.placement.nodes}, and afterwards scale to 0: nodes cost while they exist. Applying "
            "this file again scales to 0. "
        )
    return text


def limits(pool: NodePool) -> Tree:
    """Return the resources up to which the pool may grow: the sum of both queues' quotas.

    GPUs are counted as whole nodes. CPUs and memory are doubled, because pods leave parts of nodes unused.
    """
    both = {name: len(DOMAINS) * amount for name, amount in pool.needs.items()}
    if pool.uncounted:
        return {"nodes": str(len(DOMAINS) * pool.placement.nodes)}
    if pool.has_gpus:
        nodes = math.ceil(both[pool.placement.gpu_name] / pool.gpus_per_node)
        return {pool.placement.gpu_name: str(nodes * pool.gpus_per_node)}
    return {"cpu": format_quantity("cpu", 2 * both["cpu"]), "memory": format_quantity("memory", 2 * both["memory"])}


def template(pool: NodePool) -> Tree:
    selected = {key: value for key, value in pool.placement.node_selector.items() if not is_known(key)}
    labels = selected | pool.flyte_labels | pool.operator_labels
    grace = (
        f"{NOTICE_S['aws']}s" if pool.capacity == SPOT else f"{max(p.timeout_minutes for p in pool.stages.values())}m"
    )
    spec: Tree = {
        "nodeClassRef": {"group": GROUP, "kind": "EC2NodeClass", "name": class_name(pool)},
        "requirements": requirements(pool),
    }
    spec |= {"taints": pool.taints} if pool.taints else {}
    spec |= {"expireAfter": "Never", "terminationGracePeriod": grace}
    return {**({"metadata": {"labels": labels}} if labels else {}), "spec": spec}


def is_known(key: str) -> bool:
    domain = key.rpartition("/")[0]
    return any(domain == known or domain.endswith(f".{known}") for known in KNOWN_LABELS)


def requirements(pool: NodePool) -> list[Tree]:
    found = {"kubernetes.io/arch": ["amd64"], CAPACITY_LABEL: [pool.capacity]}
    found |= {key: [value] for key, value in pool.placement.node_selector.items() if is_known(key)}
    if pool.instance_types:
        found[TYPE_LABEL] = pool.instance_types
    elif pool.has_gpus:
        found[f"{GROUP}/instance-gpu-manufacturer"] = [pool.placement.gpu_name.partition(".")[0]]
    else:
        found[f"{GROUP}/instance-category"] = ["c", "m", "r"]
    listed: list[Tree] = [{"key": key, "operator": "In", "values": values} for key, values in found.items()]
    if not pool.has_gpus:
        listed.append({"key": f"{GROUP}/instance-generation", "operator": "Gt", "values": ["4"]})
    return listed
