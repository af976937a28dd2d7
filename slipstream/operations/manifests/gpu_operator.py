"""NVIDIA's GPU operator: values for its chart, GPU sharing (time slicing, MPS) and partitions (MIG)."""

from __future__ import annotations

from typing import Any

from slipstream.operations.manifests.partitions import find_partition
from slipstream.operations.manifests.pools import Tree, mig_config, node_pools
from slipstream.operations.manifests.site import ClusterSite

VALUES = "helm/gpu-operator.yaml"
#: Number of pods that share a GPU; profiles have no setting for it.
SHARES = 4
#: Clouds whose node images include driver and container toolkit.
BRING_DRIVER = ("aws", "azure")


def operator_values(site: ClusterSite) -> dict[str, Any]:
    """Return the templates' values about the GPU operator.

    Empty without NVIDIA's GPUs, and on GKE, which brings driver, device plugin and DCGM itself.
    """
    if not site.nvidia or site.cloud == "gcp":
        return {}
    placements = site.gpus.values()
    divided = {mig_config(placement): placement for placement in placements if placement.mig}
    return {
        "brings_driver": site.cloud in BRING_DRIVER,
        "shares": SHARES,
        "shared": {placement.shared_gpu: placement for placement in placements if placement.shared_gpu},
        "divided": divided,
        "partitions": {name: find_partition(placement.mig).number for name, placement in divided.items()},
        "mixed": any(placement.mig_strategy == "mixed" for placement in divided.values()),
        "tolerations": gpu_tolerations(site),
    }


def gpu_tolerations(site: ClusterSite) -> list[Tree]:
    """Return tolerations of all taints of nodes with GPUs."""
    found: list[Tree] = []
    for pool in node_pools(site):
        for taint in pool.taints if pool.has_gpus else ():
            operator = {"operator": "Equal" if "value" in taint else "Exists"}
            toleration = {"key": taint["key"], **operator, **taint}
            found += [] if toleration in found else [toleration]
    return found
