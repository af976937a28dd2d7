"""Problems that a packaged archive will have on a cluster, from its protobufs alone.

The rules are those of Flyte v1.16.8's sources: admin's validation at registration, the compiler and propeller.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flyteidl.admin.schedule_pb2 import Schedule
from flyteidl.core.interface_pb2 import Variable
from flyteidl.core.literals_pb2 import BindingData
from flyteidl.core.types_pb2 import LiteralType, OutputReference
from flyteidl.core.workflow_pb2 import Node, WorkflowTemplate

from slipstream.operations.doctor.archive import (
    GPU,
    LIMITED,
    Limits,
    RegistrationArchive,
    TaskUse,
    limit_name,
    parse_kubernetes_quantity,
    workflow_nodes,
)
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.cron import cron_error
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.placement import NVIDIA

#: Tasks that save a checkpoint when they are preempted.
SAVES = ("tasks.train.train",)
#: Kubernetes' default terminationGracePeriodSeconds.
GRACE_S = 30
#: Assumed seconds of a save if it was not measured: a pod's default grace period.
ASSUMED_SAVE_S = 30.0
#: Seconds that an attempt may wait before it works: the timeout of the cluster autoscaler for a new node, and of
#: Slipstream's rendezvous.
START_S = 15 * 60
REFUSED = "registration is refused"
MOVING_TAGS = frozenset({"latest", "main", "master", "dev", "edge", "nightly", "stable"})
#: Time zone prefix that Flyte's scheduler reads, unlike croniter.
TIME_ZONE = re.compile(r"^(CRON_)?TZ=\S+\s+")
INTERVAL = "@every "
USER = re.compile(r"^\s*(FROM|USER)\s+(\S+)", re.IGNORECASE)
REMEDY = "let an uncached task return the part as its own output, with a HashMethod over its values"


@dataclass(frozen=True)
class SaveTime:
    """Seconds for saving a checkpoint, and how they are known."""

    seconds: float = ASSUMED_SAVE_S
    source: str = "assumed"


def measured_save(trained: Path) -> SaveTime:
    """Return the last save of the training in the directory ``trained``.

    Raises ``UserError`` if it is not a trained model, or recorded no save.
    """
    seconds = read_attempt(trained).save_seconds
    if not seconds:
        raise UserError(f"{trained}: its record has no save; train with a checkpoint, or leave --trained out")
    return SaveTime(seconds, f"measured in {trained}")


def check_package(
    package: RegistrationArchive, limits: Limits | None, save: SaveTime, dockerfiles: list[Path]
) -> DoctorReport:
    """Return all findings about a package; ``dockerfiles`` are those of its images.

    ``limits`` are the platform's per task; None if they are unknown.
    """
    uses = package.uses()
    findings = [*attribute_paths(package)]
    for use in uses:
        findings += over_limits(use, limits)
        findings += spot_without_retries(use)
        findings += short_grace(use, save)
        findings += accelerator_without_gpu(use)
        findings += no_disk(use)
        findings += moving_image(use)
        findings += user_of_pod(use)
        findings += timeout_of_all_attempts(use)
    for name, plan in package.launch_plans.items():
        findings += never_fires(name, plan.entity_metadata.schedule)
    needs_number = any(runs_as_non_root(use) for use in uses)
    for file in dockerfiles:
        findings += user_of_image(file, needs_number)
    images = sorted({use.image for use in uses if use.image})
    checked = [
        f"attribute paths, spot and retries, timeouts, accelerators, disk, users and schedules of {len(package.tasks)} "
        f"tasks, {len(package.workflows)} workflows, {len(package.launch_plans)} launch plans",
        f"grace periods against a save of {save.seconds:g} s ({save.source})",
        f"images {', '.join(images)}",
    ]
    unchecked = []
    if limits is None:
        unchecked.append("requests against the platform's limits per task: --limits FILE states them")
    else:
        limited = ", ".join(f"{limit} {name}" for name in LIMITED if (limit := limits.of(name)))
        checked.append(f"requests against the platform's limits of {limited or 'nothing'}")
    if dockerfiles:
        checked.append(f"the users of {', '.join(str(file) for file in dockerfiles)}")
    else:
        unchecked.append("the images' users: no images/*.Dockerfile next to the package")
    unchecked += started_one_by_one(uses)
    return DoctorReport(tuple(findings), tuple(checked), tuple(unchecked))


def over_limits(use: TaskUse, limits: Limits | None) -> Iterator[Finding]:
    """Yield requests over the platform's limits.

    FlyteAdmin compares only requests, rounded up to whole units.
    """
    for name, requested in use.requests.items():
        limit = use.limits.get(name)
        values = [parse_kubernetes_quantity(text) for text in (requested, limit or "0")]
        if None in values:
            fix = 'write it as Kubernetes does: "4", "500m", "16Gi"'
            yield Finding("error", use.where, f"{name} {requested} is not a quantity", REFUSED, fix)
            continue
        # Floating point would put 57000m just above 57.
        asked, most = (math.ceil(round(value, 6)) for value in values if value is not None)
        if limit and (asked > most or (name == GPU and asked != most)):
            what = f"{name}: the request {requested} does not fit its limit {limit}"
            yield Finding("error", use.where, what, REFUSED, "make them equal")
        allowed = limits.of(name) if limits else ""
        if allowed and max(asked, most) > (parse_kubernetes_quantity(allowed) or 0):
            what = f"{name} {max(requested, limit or '', key=size_in_bytes)} is over the platform's {allowed}"
            fix = f"raise task_resources.limits.{limit_name(name)} in FlyteAdmin's configuration, or ask for less"
            # Admin checks neither node overrides nor GPUs by the name that a pod template has to use.
            unseen = use.node is not None or name == NVIDIA
            quietly = f"registration accepts it, and propeller gives the pod {allowed} without a message"
            yield Finding("error", use.where, what, quietly if unseen else REFUSED, fix)


def started_one_by_one(uses: list[TaskUse]) -> list[str]:
    """Return a note about jobs without a gang scheduler; the operator may add one, which a package does not show."""
    jobs = sorted({use.task.id.name for use in uses if use.pods > 1 and not use.pod.get("schedulerName")})
    if not jobs:
        return []
    return [
        f"whether all pods of a job are started or none ({', '.join(jobs)}): the profile names no scheduler, and "
        "without a gang scheduler of the operator's two jobs can each hold a part of the nodes and wait for the rest"
    ]


def size_in_bytes(text: str) -> float:
    return float(parse_kubernetes_quantity(text or "0") or 0)


def spot_without_retries(use: TaskUse) -> Iterator[Finding]:
    """Yield jobs on spot without retries.

    Flyte counts a preempted single pod as a system failure, which uses no retries, but a preempted job as a user
    failure.
    """
    if use.is_job and use.interruptible and use.retries == 0:
        yield Finding(
            "error",
            use.where,
            "a PyTorchJob on spot with retries 0",
            "its first preemption fails the execution",
            "set retries in the profile to more than the expected number of preemptions",
        )


def short_grace(use: TaskUse, save: SaveTime) -> Iterator[Finding]:
    if not (use.interruptible and use.task.id.name in SAVES):
        return
    grace, measured = int(use.pod.get("terminationGracePeriodSeconds", GRACE_S)), save.source != SaveTime.source
    if grace < save.seconds:
        yield Finding(
            "error" if measured else "warning",
            use.where,
            f"terminationGracePeriodSeconds {grace} is shorter than a save of {save.seconds:g} s ({save.source})",
            "a preempted pod is killed while it saves, and the work since the checkpoint before is repeated",
            f"set grace_seconds in the profile to {math.ceil(2 * save.seconds)} or more, if the cloud leaves that much"
            + ("" if measured else "; --trained DIRECTORY compares with a measured save"),
        )


def accelerator_without_gpu(use: TaskUse) -> Iterator[Finding]:
    if use.accelerator and not use.gpus:
        yield Finding(
            "error",
            use.where,
            f"accelerator {use.accelerator} without a GPU in the limits",
            "propeller ignores the accelerator, and the pod runs on any node, without a GPU",
            "set gpu in the profile, or remove the accelerator",
        )


def no_disk(use: TaskUse) -> Iterator[Finding]:
    if use.image and "ephemeral-storage" not in use.requests:
        yield Finding(
            "warning",
            use.where,
            "no request for disk (ephemeral-storage)",
            "it may be placed on a node without room for its data, and is evicted first when that disk is full",
            "request ephemeral-storage, in the profile",
        )


def moving_image(use: TaskUse) -> Iterator[Finding]:
    name, _, digest = use.image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if use.image and not digest and (not tag or tag in MOVING_TAGS):
        yield Finding(
            "warning",
            use.where,
            f"image {use.image} {'has no tag' if not tag else 'has a movable tag'}",
            "a retry may run other code than the attempt before, unnoticed by the cache",
            "package with a tag of its own for every build, or with the image's digest",
        )


def user_of_pod(use: TaskUse) -> Iterator[Finding]:
    for context in (use.pod.get("securityContext") or {}, use.container.get("securityContext") or {}):
        user = context.get("runAsUser")
        if user is None:
            continue
        if not isinstance(user, float):  # a protobuf Struct has no integers
            yield Finding(
                "error",
                use.where,
                f"securityContext.runAsUser is the name {user!r}",
                "Kubernetes refuses the pod",
                "give the number, as 1000",
            )
        elif user == 0 and context.get("runAsNonRoot"):
            yield Finding(
                "error",
                use.where,
                "securityContext has runAsUser 0 and runAsNonRoot",
                "the container is never started",
                "give the number of another user, as 1000",
            )


def runs_as_non_root(use: TaskUse) -> bool:
    """Return True if the kubelet must check that the image's USER is not root."""
    contexts = {**(use.pod.get("securityContext") or {}), **(use.container.get("securityContext") or {})}
    return bool(contexts.get("runAsNonRoot")) and "runAsUser" not in contexts


def user_of_image(file: Path, needs_number: bool) -> Iterator[Finding]:
    """Yield a finding if the last USER of the last build stage is not a number."""
    user = "root"
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := USER.match(line):
            user = "root" if match[1].upper() == "FROM" else match[2]
    if not user.partition(":")[0].isdigit():
        yield Finding(
            "error" if needs_number else "warning",
            str(file),
            f"the image's user is {user}, by name",
            "where pods must not run as root (runAsNonRoot), the container is never started",
            "end it with USER and a number, as `USER 1000`",
        )


def timeout_of_all_attempts(use: TaskUse) -> Iterator[Finding]:
    """Yield tasks whose retries may exceed the node's timeout.

    Propeller ends a node after twice its timeout over all attempts, including time as Pending.
    """
    if use.timeout_s and use.retries * START_S > use.timeout_s:
        total = 2 * use.timeout_s / 60
        yield Finding(
            "warning",
            use.where,
            f"{use.retries} retries within a timeout of {use.timeout_s / 60:g} min",
            f"the node as a whole ends after {total:g} min; attempts that wait {START_S // 60} min each for their "
            "machines leave the last one less than its timeout",
            f"raise timeout_minutes to {use.retries * START_S // 60} or lower retries, in the profile",
        )


def never_fires(name: str, schedule: Schedule) -> Iterator[Finding]:
    cron = TIME_ZONE.sub("", schedule.cron_schedule.schedule or schedule.cron_expression)
    if cron and not cron.startswith(INTERVAL) and (why := cron_error(cron)):
        fix = 'write it as "0 2 * * *": 2:00 UTC every day'
        yield Finding("error", name, f"cron {cron!r}: {why}", "it is refused, or never runs", fix)


def attribute_paths(package: RegistrationArchive) -> Iterator[Finding]:
    """Yield inputs and outputs that are bound to a part of a structure.

    Flyte packs the part in random key order (flyte#6517), so its bytes, and cache keys, differ in every execution.
    """
    for name, workflow in package.workflows.items():
        for identity, node in workflow_nodes(workflow):
            for binding in node.inputs:
                for promise in promises(binding.binding):
                    if reaches_in(package, workflow, promise):
                        yield about(package, f"{name}/{identity}", binding.var, promise, node)
        for binding in workflow.outputs:
            for promise in promises(binding.binding):
                if reaches_in(package, workflow, promise):
                    yield about(package, f"{name}, its outputs", binding.var, promise, None)


def about(
    package: RegistrationArchive, where: str, variable: str, promise: OutputReference, node: Node | None
) -> Finding:
    what = f"{variable} is bound to {promise_text(promise)}"
    task = package.tasks.get(node.task_node.reference_id.name) if node is not None else None
    if task is not None and task.metadata.discoverable:
        return Finding("error", where, what, "its cache never hits: it computes again in every execution", REMEDY)
    if node is not None and task is None:
        return Finding("error", where, what, "cached tasks inside that read it never hit", REMEDY)
    return Finding("warning", where, what, "cached tasks that depend on its result never hit", REMEDY)


def promises(data: BindingData) -> Iterator[OutputReference]:
    """Yield all promises in a binding, including promises in lists and maps."""
    if data.HasField("promise"):
        yield data.promise
    for inner in (*data.collection.bindings, *data.map.bindings.values()):
        yield from promises(inner)


def promise_text(promise: OutputReference) -> str:
    """Return a promise as text, such as ``n0.config.data[2]``."""
    steps = [
        f".{step.string_value}" if step.WhichOneof("value") == "string_value" else f"[{step.int_value}]"
        for step in promise.attr_path
    ]
    source = f"{promise.node_id}." if promise.node_id else "the input "
    return f"{source}{promise.var}{''.join(steps)}"


def reaches_in(package: RegistrationArchive, workflow: WorkflowTemplate, promise: OutputReference) -> bool:
    """Return True if the promise's path enters a structure.

    Elements of lists and maps do not count, as they have their own hash.
    """
    kind = type_of(package, workflow, promise)
    for step in promise.attr_path:
        shape = kind.WhichOneof("type") if kind is not None else None
        if kind is not None and shape in ("collection_type", "map_value_type"):
            kind = getattr(kind, shape)
        elif shape is None and step.WhichOneof("value") == "int_value":
            kind = None
        else:
            return True
    return False


def type_of(package: RegistrationArchive, workflow: WorkflowTemplate, promise: OutputReference) -> LiteralType | None:
    """Return a promise's type; None if its source is an array node or not in the package."""
    if promise.node_id in ("", "start-node"):
        variables = workflow.interface.inputs.variables
    else:
        source = next((node for node in workflow.nodes if node.id == promise.node_id), None)
        variables = outputs_of(package, source)
    return variables[promise.var].type if promise.var in variables else None


def outputs_of(package: RegistrationArchive, node: Node | None) -> Mapping[str, Variable]:
    if node is None or node.HasField("array_node"):
        return {}
    if node.HasField("branch_node"):
        return outputs_of(package, node.branch_node.if_else.case.then_node)
    if node.HasField("task_node"):
        source = package.tasks.get(node.task_node.reference_id.name)
    else:
        plan = package.launch_plans.get(node.workflow_node.launchplan_ref.name)
        source = package.workflows.get(plan.workflow_id.name if plan else node.workflow_node.sub_workflow_ref.name)
    return source.interface.outputs.variables if source is not None else {}
