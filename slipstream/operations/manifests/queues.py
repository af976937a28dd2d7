"""Queues of Kueue or Volcano, and quotas: values for their templates."""

from __future__ import annotations

from typing import Any

from slipstream.operations.manifests.pools import ON_DEMAND, SPOT, NodePool, node_pools
from slipstream.operations.manifests.site import DOMAINS, PRODUCTION, RESEARCH, ClusterSite
from slipstream.shared.profiles.needs import at_once, format_quantity


def uses_volcano(site: ClusterSite) -> bool:
    return any(placement.scheduler == "volcano" for placement in site.stages.values())


def queue_values(site: ClusterSite) -> dict[str, Any]:
    """Return the templates' values about queues, and about the namespaces and quotas that belong to them."""
    # CPU pools first: a pod with a GPU has no quota there and gets the next flavour.
    pools = sorted(node_pools(site), key=lambda pool: pool.has_gpus)
    needs = at_once(site.stages)
    return {
        "covered": list(needs),
        "flavours": [flavour(site, pool) for pool in pools],
        "both_capacities": {SPOT, ON_DEMAND} <= {pool.capacity for pool in pools},
        "one_job": {name: format_quantity(name, amount) for name, amount in needs.items()},
        # Of both queues: Kueue admits jobs on quota that the other queue lends, and less would refuse their pods.
        "two_jobs": {name: format_quantity(name, len(DOMAINS) * amount) for name, amount in needs.items()},
        "queues": [
            {
                "kind": queue,
                "name": f"slipstream-{queue}",
                "is_production": queue == PRODUCTION,
                "domain": DOMAINS[queue],
                "namespace": site.namespace(queue),
                "quotas": [(pool.name, quotas(pool, queue, list(needs))) for pool in pools],
            }
            for queue in (PRODUCTION, RESEARCH)
        ],
    }


def flavour(site: ClusterSite, pool: NodePool) -> dict[str, Any]:
    """Return the values of a pool's ResourceFlavor."""
    labels = {"karpenter.sh/nodepool": pool.name} if site.cloud == "aws" else pool.placement.node_selector
    return {"name": pool.name, "stages": ", ".join(pool.stages), "labels": labels, "taints": pool.taints}


def quotas(pool: NodePool, queue: str, covered: list[str]) -> dict[str, str]:
    """Return a queue's quotas on a pool, by resource; research has none on demand for stages that run on spot."""
    stages = pool.stages
    if queue == RESEARCH and pool.capacity == ON_DEMAND:
        stages = {name: placement for name, placement in stages.items() if not placement.interruptible}
    needs = at_once(stages)
    return {name: format_quantity(name, needs.get(name, 0.0)) for name in covered}
