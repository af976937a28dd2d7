"""Nodes on EKS: values for Karpenter's NodePools, and for an EC2NodeClass per kind of pool."""

from __future__ import annotations

import math
from typing import Any

from slipstream.operations.manifests.pools import CAPACITY_LABEL, SPOT, NodePool, node_pools
from slipstream.operations.manifests.site import DOMAINS, ClusterSite
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.needs import GIB, MIB, NOTICE_S, format_quantity
from slipstream.shared.profiles.placement import TYPE_LABEL

GROUP = "karpenter.k8s.aws"
#: GiB of a node's disk for images, besides the pods' requests.
IMAGES_GIB = 60
#: Domains of labels that nodes have by default: selectors on them become requirements, other selectors node labels.
KNOWN_LABELS = ("kubernetes.io", "k8s.io", "karpenter.sh", GROUP)


def karpenter_values(site: ClusterSite) -> dict[str, Any]:
    """Return the values of the template ``10-karpenter.yaml``."""
    pools = node_pools(site)
    return {
        "cluster": site.cluster,
        "machines": [machine_values(pool) for pool in {pool.kind: pool for pool in pools}.values()],
        "pools": [pool_values(pool) for pool in pools],
    }


def static_pools(site: ClusterSite) -> list[NodePool]:
    """Return the pools whose nodes have to be requested by hand."""
    return [pool for pool in node_pools(site) if pool.uncounted] if site.cloud == "aws" else []


def class_name(pool: NodePool) -> str:
    return f"slipstream-{pool.kind}"


def machine_values(pool: NodePool) -> dict[str, Any]:
    placements = pool.stages.values()
    disk = max(parse_quantity(placement.resources["ephemeral-storage"]) for placement in placements)
    pages = pool.pods_per_node * max(parse_quantity(placement.hugepages or "0") for placement in placements)
    return {
        "name": class_name(pool),
        "disk": f"{math.ceil(disk / GIB) + IMAGES_GIB}Gi",
        "reads_notices": any(placement.notices in ("auto", "aws") for placement in placements),
        "adapters": pool.pods_per_node * max(placement.efa for placement in placements),
        "huge_pages": math.ceil(pages / (2 * MIB)),
        "exclusive_cpus": any(placement.numa for placement in placements),
    }


def pool_values(pool: NodePool) -> dict[str, Any]:
    selected = {key: value for key, value in pool.placement.node_selector.items() if not is_known(key)}
    minutes = max(placement.timeout_minutes for placement in pool.stages.values())
    return {
        "name": pool.name,
        "stages": ", ".join(pool.stages),
        "is_spot": pool.capacity == SPOT,
        "uncounted": ", ".join(pool.uncounted),
        "nodes": pool.placement.nodes,
        "limits": limits(pool),
        "labels": selected | pool.flyte_labels | pool.operator_labels,
        "node_class": class_name(pool),
        "requirements": requirements(pool),
        "taints": pool.taints,
        "grace": f"{NOTICE_S['aws']}s" if pool.capacity == SPOT else f"{minutes}m",
    }


def limits(pool: NodePool) -> dict[str, str]:
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


def is_known(key: str) -> bool:
    domain = key.rpartition("/")[0]
    return any(domain == known or domain.endswith(f".{known}") for known in KNOWN_LABELS)


def requirements(pool: NodePool) -> list[tuple[str, str, list[str]]]:
    """Return label, operator and values of every requirement for the pool's nodes."""
    found = {"kubernetes.io/arch": ["amd64"], CAPACITY_LABEL: [pool.capacity]}
    found |= {key: [value] for key, value in pool.placement.node_selector.items() if is_known(key)}
    if pool.instance_types:
        found[TYPE_LABEL] = pool.instance_types
    elif pool.has_gpus:
        found[f"{GROUP}/instance-gpu-manufacturer"] = [pool.placement.gpu_name.partition(".")[0]]
    else:
        found[f"{GROUP}/instance-category"] = ["c", "m", "r"]
    newer = [] if pool.has_gpus else [(f"{GROUP}/instance-generation", "Gt", ["4"])]
    return [*((key, "In", values) for key, values in found.items()), *newer]
