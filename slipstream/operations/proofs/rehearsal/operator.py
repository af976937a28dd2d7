"""Propeller's pod plugin and the training operator: creation and watchers of an attempt's pods.

Both watchers return the attempt's outcome, or None if its output files decide.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome
from slipstream.operations.proofs.rehearsal.pods import OOM_KILLED, STUCK_S, PodProcess

#: Seconds between two looks at the pods.
LOOK_S = 0.02
#: Seconds until a refused pod is tried again at first; every pause is twice the one before (controller-runtime's
#: workqueue).
BACK_OFF_S = 0.005

Start = Callable[[int], PodProcess]


class Aborted(Exception):
    """Error of a node whose execution ends because another node failed for good."""


@dataclass
class Namespace:
    """Namespace in which at most ``quota`` pods may exist; others are refused.

    With ``volcano``, a job's PodGroup is pending, and none of its pods is created, until there is room for all.
    """

    quota: float = math.inf
    volcano: bool = False
    pods: list[PodProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def create(self, missing: range, start: Start) -> list[PodProcess]:
        """Create the ``missing`` pods of an attempt until one is refused, and return those that were created."""
        with self.lock:
            free = self.quota - sum(not pod.ended for pod in self.pods)
            if self.volcano and free < len(missing):
                return []
            made = [start(index) for index in missing[: int(min(free, len(missing)))]]
            self.pods += made
            return made


def create_pods(
    pods: list[PodProcess], replicas: int, create: Callable[[range], list[PodProcess]], late: Callable[[float], None]
) -> None:
    """Append an attempt's pods to ``pods`` until all exist.

    The operator sets a job's ``status.startTime`` only then. Until then ``late`` looks after the pods, and gets the
    seconds since the job's creation.
    """
    since, pause = time.monotonic(), BACK_OFF_S
    while True:
        pods += create(range(len(pods), replicas))
        if len(pods) >= replicas:
            return
        again, pause = time.monotonic() + pause, 2 * pause
        while time.monotonic() < again:
            late(time.monotonic() - since)


#: Message of Kubernetes and of the operator for a pod or a job beyond its ``activeDeadlineSeconds``.
DEADLINE = "DeadlineExceeded: active for longer than its deadline"


def is_overdue(pods: list[PodProcess], deadline_s: float) -> bool:
    """Delete the pods if one of them has run for longer than the deadline; return whether it has."""
    overdue = any(pod.running and time.time() - pod.started > deadline_s for pod in pods)
    for pod in pods if overdue else ():
        if not pod.ended and not pod.deleted:
            pod.delete()
    return overdue


def watch_pod(pods: list[PodProcess], aborted: threading.Event, deadline_s: float = math.inf) -> AttemptOutcome | None:
    """Watch a plain pod. Its deletion, and its end by a signal or an error, are system failures.

    ``task/k8s/plugin_manager.go: checkResourcePhase`` does not wait until a deleted pod has ended.
    """
    (pod,) = pods
    while True:
        if pod.deleted:
            return AttemptOutcome("system", "UnexpectedObjectDeletion" if pod.process else "ResourceDeletedExternally")
        if pod.ended:
            return demystified(pod)
        if is_overdue(pods, deadline_s):
            return AttemptOutcome("user", DEADLINE)  # the kubelet gives a reason
        look(pods, aborted)


def demystified(pod: PodProcess) -> AttemptOutcome | None:
    """Return propeller's outcome for a plain pod that has ended by itself (``flytek8s/pod_helper.go``).

    ``DemystifyFailure``: a failed pod counts as "Interrupted" unless the kubelet gives a reason, and it gives none for
    an exit code. After an error that flytekit catches, a pod exits 0. An OOMKilled pod is a user failure with any exit
    code (``DemystifySuccess``).
    """
    if pod.reason == OOM_KILLED:
        if pod.exit_code == 0:
            return AttemptOutcome("user", f"{OOM_KILLED}: Pod reported success despite being OOMKilled")
        return AttemptOutcome("user", f"terminated with exit code ({pod.exit_code}). Reason [{OOM_KILLED}]")
    return None if pod.exit_code == 0 else AttemptOutcome("system", f"the pod ended by {ending(pod)}")


def watch_job(
    pods: list[PodProcess], start: Start, clean: str, aborted: threading.Event, deadline_s: float = math.inf
) -> AttemptOutcome | None:
    """Watch a PyTorchJob with an elastic policy (``pytorchjob_controller.go: UpdateJobStatus``, ``common/pod.go``).

    It succeeds when the first pod exits 0. It fails when the first pod fails, or is deleted while it runs
    (``core/status.go: UpdateJobReplicaStatuses``). A pod that is deleted while Pending is created again. For Flyte a
    failed job is a user failure (``kfoperators/common: GetPhaseInfo``), and propeller deletes the job and its pods.
    After success, ``clean`` (the CleanPodPolicy) decides whether running pods are deleted.
    """
    while True:
        for index, pod in enumerate(pods):
            if pod.deleted and pod.process is None:
                pods[index] = start(index)
        # A deleted pod may live on for its grace period: it has failed all the same.
        over = [(pod.ended or time.time(), index) for index, pod in enumerate(pods) if pod.ended or pod.deleted]
        if over:
            _, index = min(over)
            outcome = outcome_of_job(pods[index], index)
            if outcome or not clean.endswith("NONE"):
                for other in pods:
                    if not other.ended and not other.deleted:
                        other.delete()
            return outcome
        if is_overdue(pods, deadline_s):
            return AttemptOutcome("user", f"PyTorchJobFailed: {DEADLINE}")
        look(pods, aborted)


def outcome_of_job(pod: PodProcess, index: int) -> AttemptOutcome | None:
    """Return the outcome of a job from the pod that decides it. The operator reads only the pod's phase."""
    if pod.exit_code == 0 and not pod.deleted:
        return None
    how = "was deleted" if pod.deleted else f"ended by {ending(pod)}"
    return AttemptOutcome("user", f"PyTorchJobFailed: 1 Worker replica(s) failed: worker {index} {how}")


def look(pods: list[PodProcess], aborted: threading.Event) -> None:
    if aborted.is_set():
        for pod in pods:
            pod.delete()
        raise Aborted
    for pod in pods:
        if time.time() - pod.started > STUCK_S:
            pod.kill()
            raise AssertionError(f"{pod.name} hangs:\n{pod.said()}")
    time.sleep(LOOK_S)


def ending(pod: PodProcess) -> str:
    code = pod.exit_code or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
