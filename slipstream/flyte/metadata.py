"""Task settings ``@task(**on("train"))``: hardware, spot, retries and caching."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from flytekit import Cache, PodTemplate, Resources, Secret, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import IgnoreOutputs
from flytekit.extras.accelerators import BaseAccelerator, GPUAccelerator, MultiInstanceGPUAccelerator

from slipstream.shared.artifacts.versions import (
    ABSENT,
    ROOT,
    closure_digest,
    code_version,
    installed_releases,
    pinned_releases,
    version_of,
)
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import CPU, MEMORY, memory_counters, what_was_killed
from slipstream.shared.profiles.placement import NVIDIA, Placement
from slipstream.shared.profiles.pod_settings import OF_CONTAINER, SecretRequest, Volume
from slipstream.shared.profiles.profile import RESOLVED, Profile, current_profile
from slipstream.shared.settings import to_dict
from slipstream.shared.stages import STAGES

WorkflowFunction = TypeVar("WorkflowFunction", bound=Callable[..., Any])
#: Keyword arguments of flytekit's ``task``.
Metadata: TypeAlias = dict[str, Any]
#: Stops flytekit from attaching metadata to uploads: adlfs rejects it, so every task with outputs on Azure would fail.
FLYTEKIT = {"FLYTE_PERSISTENCE_ATTACH_EXECUTION_METADATA": "false"}
#: Also set in ``slipstream/__init__.py``; needed here for modules that import ONNX Runtime before this project.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
#: Stops Matplotlib from asking fontconfig for fonts, which warns in images without any; charts use the browser's fonts.
#: Only in pods, since Matplotlib caches its fonts for all programs of a user.
NO_SYSTEM_FONTS = {"MPL_IGNORE_SYSTEM_FONTS": "1"}
#: Show only the task's own deck. flytekit's deck of dependencies runs pip in the pod, which takes seconds and looks for
#: a newer pip on the network.
WITH_DECK: Metadata = {"enable_deck": True, "deck_fields": ()}


def stage_metadata(stage: str, besides: tuple[str, ...] = (), *, cached: bool = True) -> Metadata:
    """Return the keyword arguments of ``task`` for a stage, from the current profile.

    The cache key ignores the inputs ``besides``. Stages without engines are never cached.
    """
    profile = current_profile()
    placement = profile.asked(stage)
    metadata: Metadata = {
        "interruptible": own_interruptible(profile, placement),
        "retries": placement.retries,
        "timeout": timedelta(minutes=placement.timeout_minutes),
        "environment": {STAGE: STAGES[stage].pod_of or stage, **pod_environment(profile, placement, stage)},
        **pod_metadata(placement, 0 if STAGES[stage].distributed and placement.nodes > 1 else deadline_s(stage)),
    }
    if cached and STAGES[stage].engines and not STAGES[stage].finds_earlier:
        # Serialised: a second execution waits for the result of the first.
        metadata["cache"] = Cache(version=registered_version(stage), serialize=True, ignored_inputs=besides)
        metadata["environment"][VERSIONS] = json.dumps(registered_versions(stage)._asdict())
    if placement.accelerator:
        metadata["accelerator"] = pod_accelerator(placement)
    if placement.shared_memory:
        metadata["shared_memory"] = placement.shared_memory
    if placement.secrets:
        metadata["secret_requests"] = [secret_request(secret) for secret in placement.secrets]
    if placement.pod_template_name:
        metadata["pod_template_name"] = placement.pod_template_name
    return metadata


def own_interruptible(profile: Profile, placement: Placement) -> bool | None:
    """Return the task's own ``interruptible``; None where it is the default of the profile's workflows.

    An own value wins over that of an execution or a launch plan (propeller's ``BuildNodeExecutionContext``).
    """
    return None if placement.interruptible == profile.default.interruptible else placement.interruptible


def profile_workflow(function: WorkflowFunction) -> WorkflowFunction:
    """Make a workflow of a function as flytekit's ``workflow`` does; its tasks are interruptible as in the profile.

    An execution and a launch plan may set it otherwise for all tasks that have no value of their own.
    """
    made: Any = workflow(function, interruptible=current_profile().default.interruptible)
    return cast("WorkflowFunction", made)


def secret_request(secret: SecretRequest) -> Secret:
    kind = Secret.MountType.ENV_VAR if secret.variable else Secret.MountType.FILE
    return Secret(secret.group, secret.key, mount_requirement=kind, env_var=secret.variable or None)


#: Environment variable with the :class:`Versions` of a cached task, as JSON; unset in local runs.
VERSIONS = "SLIPSTREAM_VERSIONS"
#: File of the project with the releases that its images install.
CONSTRAINTS = ROOT / "constraints.txt"


class Versions(NamedTuple):
    """Digest of a stage's code, and the releases of its libraries."""

    stage: str
    code: str
    libraries: dict[str, str]


def registered_version(stage: str) -> str:
    """Return the stage's version for Flyte's cache: code, libraries, and what else of the profile changes results.

    That is the hardware of timings, and of a training the process group and the precision "auto".
    """
    _, code, libraries = registered_versions(stage)
    placement = current_profile().asked(stage)
    parts = [version_of(code, libraries), *hardware_part(stage)]
    if STAGES[stage].distributed:
        parts.append(f"{placement.nodes}x{placement.processes}-{placement.auto_precision}")
    return "-".join(parts)


def installed_stage_version(stage: str) -> str:
    """Return the stage's version for keys of this machine: code and installed libraries, and hardware of timings."""
    return "-".join([code_version(stage), *hardware_part(stage)])


def hardware_part(stage: str) -> list[str]:
    if not STAGES[stage].measured:
        return []
    hardware = json.dumps(current_profile().asked(stage).hardware, sort_keys=True)
    return [hashlib.sha256(hardware.encode()).hexdigest()[:8]]


def registered_versions(stage: str) -> Versions:
    """Return the versions that pods must have, from the code here and the releases pinned for the images.

    Those are in the file that the profile names, else in ``constraints.txt``. A project without either registers what
    is installed. Raises ``UserError`` if the profile's file cannot be read.
    """
    libraries = STAGES[stage].libraries
    named = current_profile().versions
    try:
        text = Path(named or CONSTRAINTS).read_text(encoding="utf-8")
        releases = pinned_releases(libraries, text)
    except (OSError, ValueError) as error:
        if named:
            raise UserError(
                f"profile {current_profile().name}.versions: {named} cannot be read: {error}; expected the output of "
                "slipstream versions in the image"
            ) from None
        releases = installed_releases(libraries)
    return Versions(stage, closure_digest(STAGES[stage].engines), releases)


@cache
def refuse_other_versions() -> None:
    """Raise ``UserError`` in a pod whose code or libraries differ from the registered ones.

    Its result would be cached under a version that is not its own. A library that a pod lacks changes no result.
    """
    if not (travelled := os.environ.get(VERSIONS)):
        return
    stage, code, libraries = json.loads(travelled).values()
    here = closure_digest(STAGES[stage].engines)
    if here != code:
        raise UserError(
            f"{stage}: the code in this pod has the version {here}, but {code} was registered; build the image again "
            "from the registered code and register it, or register with --copy all"
        )
    for library, release in installed_releases(libraries).items():
        if release not in (ABSENT, libraries[library]):
            raise UserError(
                f"{stage}: this pod has {library} {release}, but {libraries[library]} was registered; build the image "
                "again with constraints.txt, or name the output of slipstream versions in the image as versions in "
                "the profile, and register again"
            )


def pod_environment(profile: Profile, placement: Placement, stage: str) -> dict[str, str]:
    """Return the environment variables of the stage's pods; local runs do not set them."""
    # By default torch, PyArrow, scikit-learn and BLAS start a thread for every core of the node.
    threads = {"OMP_NUM_THREADS": str(placement.threads)} if placement.threads else {}
    travelling = {CPU: placement.cpu, MEMORY: placement.memory, RESOLVED: profile.to_json(stage)}
    return {**FLYTEKIT, **NO_TELEMETRY, **NO_SYSTEM_FONTS, **threads, **placement.environment, **travelling}


#: Stages whose pods are elements of a map task with ``min_success_ratio``: propeller never aborts the last one of them
#: that fails, so a pod without a deadline of its own would keep its devices.
MAY_FAIL = ("collectives", "sweep")


def deadline_s(stage: str) -> int:
    """Return the seconds after which Kubernetes ends the stage's pods; 0 if propeller does."""
    return current_profile().asked(stage).timeout_minutes * 60 if stage in MAY_FAIL else 0


def pod_metadata(placement: Placement, deadline_s: int = 0) -> Metadata:
    """Return the resources, or the template, of the pods; 0 seconds are no deadline."""
    if deadline_s or needs_template(placement):
        return {"pod_template": pod_template(placement, deadline_s)}
    asked = placement.resources
    resources = Resources(
        cpu=placement.cpu,
        mem=placement.memory,
        gpu=asked.get(placement.gpu_name),
        ephemeral_storage=asked["ephemeral-storage"],
    )
    return {"requests": resources, "limits": resources}


def pod_accelerator(placement: Placement) -> BaseAccelerator:
    if not placement.mig:
        return GPUAccelerator(placement.accelerator)
    partition = MultiInstanceGPUAccelerator.partitioned(placement.mig)
    partition.device = placement.accelerator  # flytekit expects a subclass for every kind of GPU
    return partition


PRIMARY = "primary"
#: Environment variable with "true" or "false", from the label that propeller sets on the pods of a node: an execution
#: may run on demand whatever the profile says. Unset in pods of other profiles.
SPOT = "SLIPSTREAM_INTERRUPTIBLE"
SPOT_FROM_LABEL = {"name": SPOT, "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['interruptible']"}}}
#: Placement fields that need a pod template unless they have their defaults.
OF_A_TEMPLATE = (
    *("tolerations", "node_selector", "affinity", "scheduler", "priority", "labels", "annotations", "groups"),
    *("grace_seconds", "termination_message_policy", "efa", "rdma", "hugepages", "volumes", "service_account"),
    *("security_context", "runtime_class", "interruptible"),
)


def needs_template(placement: Placement) -> bool:
    plain = Placement()
    return placement.gpu_name != NVIDIA or any(
        getattr(placement, name) != getattr(plain, name) for name in OF_A_TEMPLATE
    )


def pod_template(placement: Placement, deadline_s: int = 0) -> PodTemplate:
    """Return the pod template of a placement, including all resources; 0 seconds are no deadline.

    flytekit drops a template's resources if the task has any itself. It also modifies templates, so every task needs a
    new one.
    """
    from kubernetes.client import V1Container, V1PodSpec, V1ResourceRequirements, V1Toleration

    # Manifests' own fields are serialised without conversion.
    affinity: Any = placement.affinity or None
    of_container, of_pod = security_contexts(placement)
    mounts: Any = [volume_mount(number, volume) for number, volume in enumerate(placement.volumes)]
    volumes: Any = [{"name": volume_name(number), **each.source()} for number, each in enumerate(placement.volumes)]
    spot: Any = [SPOT_FROM_LABEL] if placement.interruptible else []
    container = V1Container(
        name=PRIMARY,
        env=spot or None,
        resources=V1ResourceRequirements(limits=placement.resources, requests=placement.resources),
        security_context=of_container,
        termination_message_policy=placement.termination_message_policy,
        volume_mounts=mounts or None,
    )
    spec = V1PodSpec(
        containers=[container],
        tolerations=[V1Toleration(**filled(to_dict(toleration))) for toleration in placement.tolerations] or None,
        node_selector=placement.node_selector or None,
        affinity=affinity,
        scheduler_name=placement.scheduler or None,
        priority_class_name=placement.priority or None,
        security_context=of_pod,
        service_account_name=placement.service_account or None,
        runtime_class_name=placement.runtime_class or None,
        volumes=volumes or None,
        active_deadline_seconds=deadline_s or None,
        termination_grace_period_seconds=placement.grace_seconds,
    )
    return PodTemplate(
        primary_container_name=PRIMARY,
        pod_spec=spec,
        labels=placement.labels or None,
        annotations=placement.annotations or None,
    )


def security_contexts(placement: Placement) -> tuple[Any, Any]:
    """Return the security contexts of the container and of the pod, each None if it is empty."""
    asked = placement.security_context
    of_container = {name: value for name, value in asked.items() if name in OF_CONTAINER}
    of_pod = {name: value for name, value in asked.items() if name not in OF_CONTAINER}
    if placement.rdma:  # it needs this capability to pin memory for its devices
        of_container.setdefault("capabilities", {"add": ["IPC_LOCK"]})
    if placement.groups:
        of_pod["supplementalGroups"] = placement.groups
    return of_container or None, of_pod or None


def volume_name(number: int) -> str:
    return f"profile-{number}"


def volume_mount(number: int, volume: Volume) -> dict[str, Any]:
    return {"name": volume_name(number), "mountPath": volume.path, **({"readOnly": True} if volume.read_only else {})}


def filled(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


#: Environment variable with the stage of a pod; unset in local runs.
STAGE = "SLIPSTREAM_STAGE"


@contextmanager
def named_out_of_memory() -> Iterator[None]:
    """Replace an error of the block if processes were killed for lack of memory during it.

    Raises ``UserError``: a kill at the pod's own limit would recur. In a pod below its limit the node had no memory
    left, and another node may have more: raises ``FlyteRecoverableException``.
    """
    before = memory_counters()
    try:
        yield
    except IgnoreOutputs:
        raise  # the work is done, or its error is already recorded
    except Exception as error:
        now = memory_counters()
        if not (killed := what_was_killed(before, now)):
            raise
        stage = os.environ.get(STAGE)
        if stage is None:
            raise UserError(f"{killed}; give the container or machine more memory, or use fewer processes") from error
        if not now.at_limit:
            raise FlyteRecoverableException(f"{stage}: {killed}") from error
        field = f"stages.{stage}.memory in the profile {current_profile().name!r}"
        raise UserError(f"{stage}: {killed}; raise {field}") from error
