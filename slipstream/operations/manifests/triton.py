"""Model in service: values for Triton's Deployment and its autoscaler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.operations.manifests.pools import CAPACITY_LABEL, ON_DEMAND, about_spot
from slipstream.operations.manifests.site import ClusterSite
from slipstream.shared.profiles.needs import NOTICE_S
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.settings import to_dict

IMAGE = "nvcr.io/nvidia/tritonserver:25.08-py3"
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
#: Maximum seconds from SIGTERM to SIGKILL; and seconds that a pod still answers until routing to it stops.
GRACE_S, DRAIN_S = 30, 5


@dataclass(frozen=True)
class TritonService:
    #: Address of Triton's model repository, as ``slipstream triton`` writes it.
    models: str
    #: True to scale by Triton's queue with KEDA, False to scale by the pods' CPU use.
    keda: bool


def needs_keda(site: ClusterSite, serving: TritonService) -> bool:
    """Return True if KEDA scales: on request, and for GPU pods, whose load does not show in CPU use."""
    return serving.keda or bool(int(site.profile.asked("export").gpu))


def triton_values(site: ClusterSite, serving: TritonService) -> dict[str, Any]:
    """Return the values of the template ``60-triton.yaml``."""
    # Variants were timed on this placement, so the model card's figures hold for such pods.
    placement = site.profile.asked("export")
    grace = min(GRACE_S, NOTICE_S.get(site.cloud, GRACE_S))
    tolerated = [each for each in placement.tolerations if not about_spot(each.key, each.value)]
    return {
        "image": IMAGE,
        "prometheus": PROMETHEUS,
        "models": serving.models,
        "keda": needs_keda(site, serving),
        "grace_s": grace,
        "drain_s": DRAIN_S,
        "node_selector": node_selector(site, placement),
        "tolerations": [{name: value for name, value in to_dict(each).items() if value} for each in tolerated],
        "resources": placement.resources,
    }


def node_selector(site: ClusterSite, placement: Placement) -> dict[str, str]:
    on_demand = {CAPACITY_LABEL: ON_DEMAND} if site.cloud == "aws" else {}
    own = {key: value for key, value in placement.node_selector.items() if not about_spot(key, value)}
    return own | on_demand
