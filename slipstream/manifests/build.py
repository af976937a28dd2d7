"""Construction of all manifests for a site."""

from __future__ import annotations

from slipstream.manifests.documents import ManifestFile
from slipstream.manifests.gpu_operator import gpu_operator
from slipstream.manifests.karpenter import karpenter
from slipstream.manifests.queues import priorities, queues
from slipstream.manifests.quota import namespaces, quota
from slipstream.manifests.site import ClusterSite
from slipstream.manifests.triton import TritonService, triton


def manifests(site: ClusterSite, serving: TritonService | None) -> list[ManifestFile]:
    """Return all files for a site in the order in which ``kubectl apply -f`` applies them.

    Files in folders come last; kubectl does not apply them.
    """
    operator = gpu_operator(site)
    applied = [
        namespaces(site, serving is not None, bool(operator)),
        *karpenter(site),
        priorities(serving is not None),
        *queues(site),
        quota(site),
        *operator,
        *([triton(site, serving)] if serving else []),
    ]
    return sorted(applied, key=lambda file: ("/" in file.path, file.path))
