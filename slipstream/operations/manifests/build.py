"""Construction of all manifests for a site."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.operations.manifests.documents import ManifestFile, render_file
from slipstream.operations.manifests.gpu_operator import VALUES, operator_values
from slipstream.operations.manifests.karpenter import karpenter_values, static_pools
from slipstream.operations.manifests.queues import queue_values, uses_volcano
from slipstream.operations.manifests.site import ClusterSite
from slipstream.operations.manifests.triton import TritonService, needs_keda, triton_values

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
