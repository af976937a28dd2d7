"""Construction of all manifests for a site, with its queues, from the templates in ``templates/``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slipstream.operations.manifests.karpenter import karpenter_values, static_pools
from slipstream.operations.manifests.pools import ON_DEMAND, SPOT, VALUES, NodePool, node_pools, operator_values
from slipstream.operations.manifests.site import DOMAINS, PRODUCTION, RESEARCH, ClusterSite
from slipstream.operations.manifests.triton import TritonService, needs_keda, triton_values
from slipstream.shared.profiles.needs import at_once, format_quantity

#: First line of every file, by which a later call recognises its own files.
MARK = "# Written by slipstream manifests"
TEMPLATES = Path(__file__).with_name("templates")
#: Characters that JSON allows in a string and YAML does not, or takes for a line break.
SPECIAL = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class ManifestFile:
    """Output file; ``path`` is relative to the output directory, and ``purpose`` is printed."""

    path: str
    purpose: str
    text: str


def quoted(value: object) -> str:
    """Return a value as JSON, which in YAML is the same value on one line, whatever characters it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return SPECIAL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@cache
def jinja_environment() -> Environment:
    """Return the environment; ``finalize`` passes every value of every template through :func:`quoted`."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        finalize=quoted,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_file(path: str, purpose: str, values: Mapping[str, object], template: str = "") -> ManifestFile:
    """Render the template of this path, or ``template``; equal values give equal bytes."""
    head = f"{MARK} for the profile {quoted(values['profile'])}: {purpose}.\n"
    return ManifestFile(path, purpose, head + jinja_environment().get_template(template or path).render(values))


VOLCANO = "30-volcano.yaml"


def build_manifests(site: ClusterSite, serving: TritonService | None) -> list[ManifestFile]:
    """Return all files for a site in the order in which ``kubectl apply -f`` applies them.

    Files in folders come last; kubectl does not apply them.
    """
    return sorted(rendered_files(site, serving), key=lambda file: ("/" in file.path, file.path))


def rendered_files(site: ClusterSite, serving: TritonService | None) -> Iterator[ManifestFile]:
    operator = operator_values(site)
    values = {"profile": site.profile.name, "serve": serving is not None, **queue_values(site), **operator}
    values["has_operator"] = bool(operator)
    yield render_file("00-namespaces.yaml", "namespaces of the other objects", values)
    if site.cloud == "aws":
        needs = " with its feature gate StaticCapacity" if static_pools(site) else ""
        purpose = f"nodes on spot and on demand (needs Karpenter{needs})"
        yield render_file("10-karpenter.yaml", purpose, values | karpenter_values(site))
    yield render_file("20-priorities.yaml", "PriorityClasses, for `priority` of a profile", values)
    if uses_volcano(site):
        yield render_file(VOLCANO, "queues for research and production (needs Volcano)", values)
    else:
        yield render_file("30-kueue.yaml", "queues for research and production (needs Kueue)", values)
        yield render_file(
            "instead-of-kueue/volcano.yaml", "the same for clusters with Volcano instead", values, VOLCANO
        )
    yield render_file("40-quota.yaml", "ResourceQuota of Flyte's namespaces", values)
    if operator:
        if operator["shared"]:
            yield render_file("50-gpu-sharing.yaml", "device-plugin sharing of a GPU by several pods", values)
        if operator["divided"]:
            yield render_file("50-gpu-partitions.yaml", "MIG configuration of a GPU", values)
        purpose = "values of the GPU operator's chart, with DCGM's ServiceMonitor"
        yield render_file(VALUES, purpose, values, "gpu-operator-values.yaml")
    if serving:
        needs = " (needs KEDA and monitoring/podmonitor-triton.yaml)" if needs_keda(site, serving) else ""
        purpose = f"the served model: Triton and its autoscaler{needs}"
        yield render_file("60-triton.yaml", purpose, values | triton_values(site, serving))


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
