"""Pod templates: what a placement asks for and a container task of Flyte cannot say."""

from __future__ import annotations

from typing import Any

from flytekit import PodTemplate

from slipstream.profiles.placement import NVIDIA, Placement
from slipstream.settings import to_dict

PRIMARY = "primary"
#: Fields that only a pod template can say, if they differ from Kubernetes' or Flyte's own for a container task.
OF_A_TEMPLATE = (
    *("tolerations", "node_selector", "affinity", "scheduler", "priority", "labels", "annotations", "groups"),
    *("grace_seconds", "termination_message_policy", "efa", "rdma", "hugepages"),
)


def needs_template(place: Placement) -> bool:
    plain = Placement()
    return place.gpu_name != NVIDIA or any(getattr(place, name) != getattr(plain, name) for name in OF_A_TEMPLATE)


def pod_template(place: Placement) -> PodTemplate:
    """The pod of a placement, with all its resources: flytekit drops those of a template if the task names any.

    A fresh one for each task: flytekit changes the one it is given.
    """
    from kubernetes.client import (
        V1Capabilities,
        V1Container,
        V1PodSecurityContext,
        V1PodSpec,
        V1ResourceRequirements,
        V1SecurityContext,
        V1Toleration,
    )

    # Without it RDMA cannot pin the memory that its devices read.
    pinning = V1SecurityContext(capabilities=V1Capabilities(add=["IPC_LOCK"])) if place.rdma else None
    container = V1Container(
        name=PRIMARY,
        resources=V1ResourceRequirements(limits=place.resources, requests=place.resources),
        security_context=pinning,
        termination_message_policy=place.termination_message_policy,
    )
    affinity: Any = place.affinity or None  # serialised as it is
    spec = V1PodSpec(
        containers=[container],
        tolerations=[V1Toleration(**filled(to_dict(toleration))) for toleration in place.tolerations] or None,
        node_selector=place.node_selector or None,
        affinity=affinity,
        scheduler_name=place.scheduler or None,
        priority_class_name=place.priority or None,
        security_context=V1PodSecurityContext(supplemental_groups=place.groups) if place.groups else None,
        termination_grace_period_seconds=place.grace_seconds,
    )
    return PodTemplate(
        primary_container_name=PRIMARY,
        pod_spec=spec,
        labels=place.labels or None,
        annotations=place.annotations or None,
    )


def filled(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
