"""Jobs that wait for their pods, by a quota or in Volcano's queue.

The training operator sets ``status.startTime`` of a job once all of its pods exist. Propeller fails every round of an
execution with a job that has none after ``plugins.kf-operator.timeout``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.operations.doctor.archive import TaskUse
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.operations.doctor.kubectl import Ask, KubeObject, list_objects
from slipstream.operations.doctor.manifests import FLYTE_DOMAINS
from slipstream.operations.doctor.propeller import (
    ConfigCheck,
    Propeller,
    Settings,
    command_line_option,
    duration_s,
    last_setting,
)

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
