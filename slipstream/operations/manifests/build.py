"""Construction of all manifests for a site."""

from __future__ import annotations

from slipstream.operations.manifests.documents import ManifestFile
from slipstream.operations.manifests.gpu_operator import gpu_operator
from slipstream.operations.manifests.karpenter import karpenter_files
from slipstream.operations.manifests.queues import priority_classes_file, queue_files
from slipstream.operations.manifests.quota import namespaces_file, resource_quota_file
from slipstream.operations.manifests.site import ClusterSite
from slipstream.operations.manifests.triton import TritonService, triton_file


def build_manifests(site: ClusterSite, serving: TritonService | None) -> list[ManifestFile]:
    """Return all files for a site in the order in which ``kubectl apply -f`` applies them.

    Files in folders come last; kubectl does not apply them.
    """
    operator = gpu_operator(site)
    applied = [
        namespaces_file(site, serving is not None, bool(operator)),
        *karpenter_files(site),
        priority_classes_file(serving is not None),
        *queue_files(site),
        resource_quota_file(site),
        *operator,
        *([triton_file(site, serving)] if serving else []),
    ]
    return sorted(applied, key=lambda file: ("/" in file.path, file.path))
