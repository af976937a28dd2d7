"""Comparison of a package with a cluster, read by ``kubectl``.

Findings about nodes are only warnings: pools scaled to zero show no nodes, and selectors and tolerations that Flyte's
configuration adds are invisible here.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence

from slipstream.operations.doctor.archive import RegistrationArchive, TaskUse, parse_kubernetes_quantity
from slipstream.operations.doctor.capacity import capacity_check
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.operations.doctor.kubectl import Ask, KubectlError, KubeObject, kubectl, list_names, list_objects
from slipstream.operations.doctor.manifests import FLYTE_DOMAINS
from slipstream.operations.doctor.propeller import (
    ConfigCheck,
    Propeller,
    Settings,
    check_propeller,
    command_line_option,
    duration_s,
    last_setting,
)
from slipstream.operations.doctor.raw_outputs import lifetime_check

CRD = "pytorchjobs.kubeflow.org"
TRAINER_V2 = "trainjobs.trainer.kubeflow.org"
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
REPELS = ("NoSchedule", "NoExecute")


def check_cluster(package: RegistrationArchive, ask: Ask = kubectl) -> DoctorReport:
    """Compare the package with the cluster of the current context.

    Without kubectl or a context, the report says that this was not checked.
    """
    if ask is kubectl and not shutil.which("kubectl"):
        return DoctorReport(unchecked=("the cluster: no kubectl on PATH",))
    try:
        context = ask("config", "current-context")
    except KubectlError as error:
        return DoctorReport(unchecked=(f"the cluster: no current context ({error})",))
    uses = package.uses()
    report = DoctorReport(checked=(f"the cluster of kubectl's context {context}",))
    for look in (check_operator, check_priorities, check_named_objects, check_nodes, check_competing_jobs):
        try:
            report += look(uses, ask)
        except KubectlError as error:
            report += DoctorReport(unchecked=(str(error),))
    return report + check_propeller(ask, (job_timeout_check(uses, ask), capacity_check(uses), lifetime_check(uses)))


# Training operator


def check_operator(uses: Sequence[TaskUse], ask: Ask) -> DoctorReport:
    jobs = [use.where for use in uses if use.is_job]
    if not jobs:
        return DoctorReport()
    definitions = {each["metadata"]["name"]: each for each in list_objects(ask, "customresourcedefinitions")}
    fix = "install training-operator 1.8 or 1.9"
    if CRD not in definitions:
        what = f"the cluster has no {CRD}"
        what += ", only Kubeflow Trainer v2, which has no PyTorchJob" if TRAINER_V2 in definitions else ""
        consequence = "propeller cannot create the job: the task waits, and fails"
        return DoctorReport(tuple(Finding("error", where, what, consequence, fix) for where in jobs))
    version = generation(definitions[CRD])
    findings: tuple[Finding, ...] = ()
    if version == "older than 1.8":
        what = f"the cluster's {CRD} is {version}"
        findings = (Finding("warning", "the cluster", what, "its elastic jobs behave differently", fix),)
    containers = operator_containers(ask)
    unchecked: tuple[str, ...] = ()
    if not containers:
        waiting = [
            job["metadata"]["name"] for job in list_objects(ask, CRD, "--all-namespaces") if not job.get("status")
        ]
        if waiting:
            what = f"no deployment runs the training operator, and the job {waiting[0]} has no status"
            findings += (Finding("warning", "the cluster", what, "the pods of jobs never start", fix),)
        else:
            unchecked = ("whether the training operator runs: no deployment has its image, and no job waits for it",)
    images = ", ".join(sorted({container["image"] for container in containers})) or "no deployment"
    return DoctorReport(findings, (f"training operator: {CRD} {version}, {images}",), unchecked)


def generation(definition: KubeObject) -> str:
    """Return the operator's version by its resource definition, as image tags may be commits.

    ``managedBy`` came with 1.9; before, the generator's version separates 1.8 from older ones.
    """
    served = [version for version in definition["spec"]["versions"] if version.get("served")]
    if '"managedBy"' in json.dumps(served):
        return "of 1.9 or newer"
    annotations = definition["metadata"].get("annotations", {})
    generator = annotations.get("controller-gen.kubebuilder.io/version", "v0.0").removeprefix("v").split(".")
    return "of 1.8" if [int(part) for part in generator[:2]] >= [0, 14] else "older than 1.8"


# Priority classes


def check_priorities(uses: Sequence[TaskUse], ask: Ask) -> DoctorReport:
    wanted = {use.where: use.pod["priorityClassName"] for use in uses if use.pod.get("priorityClassName")}
    if not wanted:
        return DoctorReport()
    there = {each["metadata"]["name"] for each in list_objects(ask, "priorityclasses")}
    findings = [
        Finding(
            "error",
            where,
            f"the cluster has no priority class {name}",
            "Kubernetes refuses the pod",
            "create it, or change priority in the profile",
        )
        for where, name in wanted.items()
        if name not in there
    ]
    return DoctorReport(tuple(findings), (f"priority classes {', '.join(sorted(set(wanted.values())))}",))


# Objects in the namespace of the pods


#: Kinds of objects that pods name, with the settings of a profile that name them.
NAMED = {
    "serviceaccounts": "service_account",
    "podtemplates": "pod_template_name",
    "persistentvolumeclaims": "volumes",
    "secrets": "secrets",
}


def named_objects(use: TaskUse) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the objects that a task's pods name."""
    if account := use.pod.get("serviceAccountName"):
        yield "serviceaccounts", account
    if template := use.task.metadata.pod_template_name:
        yield "podtemplates", template
    for volume in use.pod.get("volumes") or []:
        if claim := volume.get("persistentVolumeClaim", {}).get("claimName"):
            yield "persistentvolumeclaims", claim
    for secret in use.task.security_context.secrets:
        yield "secrets", secret.group


def check_named_objects(uses: Sequence[TaskUse], ask: Ask) -> DoctorReport:
    """Report objects that no namespace of Flyte's has; a pod that names one of them is never created or started."""
    named: dict[tuple[str, str], str] = {}
    for use in uses:
        for kind_and_name in named_objects(use):
            named.setdefault(kind_and_name, use.where)
    findings, unchecked = [], []
    for kind in sorted({kind for kind, _ in named}):
        try:
            there = list_names(ask, kind)
        except KubectlError as error:
            unchecked.append(str(error))
            continue
        findings += [
            Finding(
                "error",
                where,
                f"the cluster has no {kind[:-1]} {name}",
                "the pods that name it are refused or wait until the timeout",
                f"create it in the namespace of the executions, or change {NAMED[kind]} in the profile",
            )
            for (of, name), where in named.items()
            if of == kind and name not in there
        ]
    checked = (f"that there are {', '.join(sorted(f'{kind[:-1]} {name}' for kind, name in named))}",) if named else ()
    return DoctorReport(tuple(findings), checked, tuple(unchecked))


# Nodes


def check_nodes(uses: Sequence[TaskUse], ask: Ask) -> DoctorReport:
    nodes = list_objects(ask, "nodes")
    allocatable = {name: sum(allocatable_amount(node, name) for node in nodes) for name in GPUS}
    gpus = ", ".join(f"{total:g} {name}" for name, total in allocatable.items() if total) or "no GPUs"
    checked = f"selectors, tolerations and requests against {len(nodes)} nodes with {gpus} allocatable"
    affine = any("affinity" in use.pod for use in uses)
    unchecked = ("the affinity of pods, which only the scheduler can evaluate",) if affine else ()
    return DoctorReport(tuple(finding for use in uses for finding in unschedulable(use, nodes)), (checked,), unchecked)


def unschedulable(use: TaskUse, nodes: Sequence[KubeObject]) -> Iterator[Finding]:
    """Yield a finding if the nodes, even when empty, cannot hold all pods of a task at once."""
    obstacles = Counter(scheduling_obstacle(use, node) for node in nodes)
    room = sum(pods_on(use, node) for node in nodes if not scheduling_obstacle(use, node))
    if room >= use.pods or not use.image:
        return
    reasons = ", ".join(f"{number} {why}" for why, number in obstacles.items() if why)
    yield Finding(
        "warning",
        use.where,
        f"of {use.pods} pods {room} fit on the cluster's {len(nodes)} nodes ({reasons or 'too few of them'})",
        "the others stay Pending until an autoscaler adds a node that fits, or the timeout ends them",
        "check labels, taints and sizes of the node pool, or the profile's node_selector, tolerations and requests",
    )


def check_competing_jobs(uses: Sequence[TaskUse], ask: Ask) -> DoctorReport:
    """Report jobs that fit on the cluster once but not twice, if two can get some of their pods each."""
    jobs = [use for use in uses if use.is_job and use.pods > 1 and use.image and not use.pod.get("schedulerName")]
    if not jobs or gang_scheduler(ask):
        return DoctorReport()
    nodes = list_objects(ask, "nodes")
    return DoctorReport(tuple(finding for use in jobs for finding in competing(use, nodes)))


def competing(use: TaskUse, nodes: Sequence[KubeObject]) -> Iterator[Finding]:
    room = sum(pods_on(use, node) for node in nodes if not scheduling_obstacle(use, node))
    if use.pods <= room < 2 * use.pods:
        yield Finding(
            "warning",
            use.where,
            f"the cluster has room for {room} pods, but not for two jobs of {use.pods}, and nothing starts all pods of "
            "a job or none",
            "two jobs can get some of their pods each and wait for the others, until one gives up after 15 minutes",
            f"start the training operator with {GANG_SCHEDULER}, or admit jobs by Kueue (Flyte 1.16.6 or newer)",
        )


def scheduling_obstacle(use: TaskUse, node: KubeObject) -> str:
    """Return why an empty node cannot hold a pod of the task; "" if it can."""
    labels = node["metadata"].get("labels", {})
    for name, value in (use.pod.get("nodeSelector") or {}).items():
        if labels.get(name) != value:
            return f"without label {name}={value}"
    if use.accelerator and use.gpus and use.accelerator not in labels.values():
        return f"without a label for accelerator {use.accelerator}"
    for taint in node["spec"].get("taints", []):
        if taint["effect"] in REPELS and not any(tolerates(each, taint) for each in use.pod.get("tolerations") or []):
            return f"with taint {taint['key']} that is not tolerated"
    for name, text in use.requests.items():
        if allocatable_amount(node, name) < (parse_kubernetes_quantity(text) or 0):
            return f"with less than {text} {name}"
    if node["spec"].get("unschedulable"):
        return "cordoned"
    return ""


def tolerates(toleration: KubeObject, taint: KubeObject) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


def pods_on(use: TaskUse, node: KubeObject) -> int:
    """Return how many pods of the task fit on an empty node."""
    each = {name: value for name, text in use.requests.items() if (value := parse_kubernetes_quantity(text))}
    return min((int(allocatable_amount(node, name) // value) for name, value in each.items()), default=use.pods)


def allocatable_amount(node: KubeObject, resource: str) -> float:
    """Return the allocatable amount of a resource on a node.

    ``gpu`` means any vendor's GPUs, as Flyte is configured for one kind.
    """
    given = node["status"].get("allocatable", {})
    names = GPUS if resource == "gpu" else (resource,)
    return max(parse_kubernetes_quantity(given.get(name, "0")) or 0.0 for name in names)


# The training operator sets ``status.startTime`` of a job once all of its pods exist. Propeller fails every round of an
# execution with a job that has none after ``plugins.kf-operator.timeout``.
#: Name of the training operator's image; its tag is a version or a commit.
OPERATOR = "training-operator"
GANG_SCHEDULER = "--gang-scheduler-name"
TIMEOUT = "kf-operator.timeout"
#: Propeller's default of the timeout.
DEFAULT_S = 60.0
#: Keys of a quota that can refuse pods, and prefixes of such keys.
LIMITING = ("pods", "count/pods", "cpu", "memory", "ephemeral-storage")
LIMITING_PREFIXES = ("requests.", "limits.")


def operator_containers(ask: Ask) -> list[KubeObject]:
    """Return the containers of all deployments that run the training operator."""
    return [
        container
        for deployment in list_objects(ask, "deployments", "--all-namespaces")
        for container in deployment["spec"]["template"]["spec"]["containers"]
        if OPERATOR in container.get("image", "")
    ]


def gang_scheduler(ask: Ask) -> str:
    """Return the scheduler by which the training operator starts all pods of a job together; "" for none."""
    options = [
        command_line_option([*(container.get("command") or []), *(container.get("args") or [])], GANG_SCHEDULER)
        for container in operator_containers(ask)
    ]
    return next(filter(None, options), "")


def job_timeout_check(uses: Sequence[TaskUse], ask: Ask) -> ConfigCheck:
    """Return the check that propeller waits for a job's pods as long as the package does."""
    jobs = [use for use in uses if use.is_job]

    def check(propeller: Propeller, files: Sequence[Settings]) -> DoctorReport:
        if not jobs:
            return DoctorReport()
        given = last_setting(files, "plugins", *TIMEOUT.split("."))
        timeout_s = duration_s(f"plugins.{TIMEOUT}", given, DEFAULT_S)
        longest = max(jobs, key=lambda use: use.timeout_s)
        checked = f"plugins.{TIMEOUT}, {timeout_s:g} s{', the default,' if given is None else ''} by the ConfigMaps of "
        report = DoctorReport(checked=(checked + propeller.where,))
        if timeout_s >= longest.timeout_s:
            return report
        return report + DoctorReport(tuple(too_short(propeller, timeout_s, longest, why) for why in delays(ask)))

    return check


def delays(ask: Ask) -> Iterator[str]:
    """Yield what can keep pods of a job from being created."""
    for quota in list_objects(ask, "resourcequotas", "--all-namespaces"):
        namespace, hard = quota["metadata"]["namespace"], quota["spec"].get("hard") or {}
        limits = any(key in LIMITING or key.startswith(LIMITING_PREFIXES) for key in hard)
        if limits and namespace.endswith(FLYTE_DOMAINS):
            yield f"ResourceQuota {namespace}/{quota['metadata']['name']}"
    if gang_scheduler(ask) == "volcano":
        yield f"the training operator's {GANG_SCHEDULER}=volcano"


def too_short(propeller: Propeller, timeout_s: float, longest: TaskUse, why: str) -> Finding:
    minutes = -(-longest.timeout_s // 60)
    return Finding(
        "warning",
        propeller.where,
        f"plugins.{TIMEOUT} is {timeout_s:g} s, but {why} may keep a job waiting for {minutes} min ({longest.where})",
        "a job without all of its pods after that time ends its execution, whatever its retries",
        f"set {propeller.chart_value('plugins', TIMEOUT)} to {minutes}m in the chart's values",
    )
