"""``@task(**on("train"))``: everything a task tells the cluster about hardware, spot, retries and caching."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from flytekit import Cache, PodTemplate, Resources
from flytekit.extras.accelerators import GPUAccelerator

from tasks.artifacts.versions import CODE, code_version
from tasks.hardware.profile import RESOLVED, Placement, current_profile

PRIMARY = "primary"


def on(stage: str, besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The metadata of a stage's task, from the current profile. Stages without a code version are never cached;
    ``besides`` are inputs that make no difference to the cache."""
    profile = current_profile()
    place = profile.placement(stage)
    resources = Resources(cpu=place.cpu, mem=place.memory, gpu=place.gpu if place.gpu != "0" else None)
    metadata: dict[str, Any] = {
        "requests": resources,
        "limits": resources,
        "interruptible": place.interruptible,
        "retries": place.retries,
        "timeout": timedelta(minutes=place.timeout_minutes),
        "environment": {**place.environment, RESOLVED: profile.to_json()},
    }
    if stage in CODE:
        # Serialised: of two executions that want the same result at once, the second waits for the first's.
        metadata["cache"] = Cache(version=code_version(stage), serialize=True, ignored_inputs=besides)
    if place.accelerator:
        metadata["accelerator"] = GPUAccelerator(place.accelerator)
    if place.shared_memory:
        metadata["shared_memory"] = place.shared_memory
    if place.tolerations or place.node_selector:
        metadata["pod_template"] = pod_template(place)
    return metadata


def pod_template(place: Placement) -> PodTemplate:
    """What only a pod template can say. A fresh one for each task: flytekit changes the one it is given."""
    from kubernetes.client import V1Container, V1PodSpec, V1Toleration

    tolerations = [
        V1Toleration(key=t.key or None, operator=t.operator, value=t.value or None, effect=t.effect or None)
        for t in place.tolerations
    ]
    spec = V1PodSpec(
        containers=[V1Container(name=PRIMARY)],
        tolerations=tolerations,
        node_selector=place.node_selector or None,
    )
    return PodTemplate(primary_container_name=PRIMARY, pod_spec=spec)
