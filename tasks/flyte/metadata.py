"""``@task(**on("train"))``: everything a task tells the cluster about hardware, spot, retries and caching."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any

from flytekit import Cache, Resources
from flytekit.extras.accelerators import BaseAccelerator, GPUAccelerator, MultiInstanceGPUAccelerator

from slipstream.artifacts.versions import code_version
from slipstream.machine.limits import CPU, MEMORY
from slipstream.profiles.placement import Placement
from slipstream.profiles.profile import RESOLVED, Profile, current_profile
from slipstream.stages import STAGES
from tasks.flyte.literal_types import describe_once
from tasks.flyte.pods import needs_template, pod_template

#: adlfs does not take the metadata that flytekit attaches to what it uploads: every task fails whose outputs are on
#: Azure.
FLYTEKIT = {"FLYTE_PERSISTENCE_ATTACH_EXECUTION_METADATA": "false"}
#: As ``slipstream/__init__.py`` sets it, for what imports ONNX Runtime before any of our code.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
#: For a task with a deck of its own, and none of flytekit's: for the list of dependencies it runs pip in the pod, which
#: takes seconds and asks the network whether there is a newer pip.
WITH_DECK: dict[str, Any] = {"enable_deck": True, "deck_fields": ()}

describe_once()


def on(stage: str, besides: tuple[str, ...] = (), *, cached: bool = True) -> dict[str, Any]:
    """The metadata of a stage's task, from the current profile. Stages without engines are never cached;
    ``besides`` are inputs that make no difference to the cache."""
    profile = current_profile()
    place = profile.asked(stage)
    metadata: dict[str, Any] = {
        "interruptible": place.interruptible,
        "retries": place.retries,
        "timeout": timedelta(minutes=place.timeout_minutes),
        "environment": environment(profile, place),
        **pod_of(place),
    }
    if cached and STAGES[stage].engines and not STAGES[stage].finds_earlier:
        # Serialised: of two executions that want the same result at once, the second waits for the first's.
        metadata["cache"] = Cache(version=cache_version(stage), serialize=True, ignored_inputs=besides)
    if place.accelerator:
        metadata["accelerator"] = accelerator(place)
    if place.shared_memory:
        metadata["shared_memory"] = place.shared_memory
    return metadata


def cache_version(stage: str) -> str:
    """What a cached result depends on besides its inputs: the code, and the hardware where it is measured."""
    if not STAGES[stage].measured:
        return code_version(stage)
    hardware = json.dumps(current_profile().asked(stage).hardware, sort_keys=True)
    return f"{code_version(stage)}-{hashlib.sha256(hardware.encode()).hexdigest()[:8]}"


def environment(profile: Profile, place: Placement) -> dict[str, str]:
    """The environment of the pods. It never reaches a task that runs on one machine, outside a pod."""
    # For torch, PyArrow, scikit-learn and BLAS alike: left to themselves they start a thread per core of the node.
    threads = {"OMP_NUM_THREADS": str(place.threads)} if place.threads else {}
    travelling = {CPU: place.cpu, MEMORY: place.memory, RESOLVED: profile.to_json()}
    return {**FLYTEKIT, **NO_TELEMETRY, **threads, **place.environment, **travelling}


def pod_of(place: Placement) -> dict[str, Any]:
    if needs_template(place):
        return {"pod_template": pod_template(place)}
    asked = place.resources
    resources = Resources(
        cpu=place.cpu,
        mem=place.memory,
        gpu=asked.get(place.gpu_name),
        ephemeral_storage=asked["ephemeral-storage"],
    )
    return {"requests": resources, "limits": resources}


def accelerator(place: Placement) -> BaseAccelerator:
    if not place.mig:
        return GPUAccelerator(place.accelerator)
    partition = MultiInstanceGPUAccelerator.partitioned(place.mig)
    partition.device = place.accelerator  # flytekit wants a subclass for each kind of GPU
    return partition
