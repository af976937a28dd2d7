"""Watchers of an attempt's pods: propeller's pod plugin for one, the training operator for a PyTorchJob.

Both return None when the attempt's outputs decide, else the verdict.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from tests.support.cluster.budgets import Verdict
from tests.support.cluster.pods import OOM_KILLED, STUCK_S, Pod

#: Between two looks at the pods.
LOOK_S = 0.02

Start = Callable[[int], Pod]


class Aborted(Exception):
    """Another node failed for good, and with it the execution."""


def watch_pod(pods: list[Pod], aborted: threading.Event) -> Verdict | None:
    """Watch a plain pod. Its deletion, and its end by a signal or an error, are system failures.

    ``task/k8s/plugin_manager.go: checkResourcePhase`` does not wait for the end of a pod that is being deleted. A
    deleted Pending pod no longer exists.
    """
    (pod,) = pods
    while True:
        if pod.deleted:
            return Verdict("system", "UnexpectedObjectDeletion" if pod.process else "ResourceDeletedExternally")
        if pod.ended:
            return demystified(pod)
        look(pods, aborted)


def demystified(pod: Pod) -> Verdict | None:
    """What propeller makes of a plain pod that has ended by itself (``flytek8s/pod_helper.go``).

    ``DemystifyFailure``: without a reason from the kubelet, which gives none for an exit code, any failed pod was
    "Interrupted". A pod exits 0 after an error that flytekit catches, so it has not failed. An OOMKilled pod is a user
    failure with any exit code (``DemystifySuccess``): its outputs are not read.
    """
    if pod.reason == OOM_KILLED:
        if pod.exit_code == 0:
            return Verdict("user", f"{OOM_KILLED}: Pod reported success despite being OOMKilled")
        return Verdict("user", f"terminated with exit code ({pod.exit_code}). Reason [{OOM_KILLED}]")
    return None if pod.exit_code == 0 else Verdict("system", f"the pod ended by {ending(pod)}")


def watch_job(pods: list[Pod], start: Start, clean: str, aborted: threading.Event) -> Verdict | None:
    """A PyTorchJob with an elastic policy (``pytorchjob_controller.go: UpdateJobStatus``, ``common/pod.go``).

    It has succeeded when the first pod exits 0 and has failed when the first fails, or is deleted while it runs
    (``core/status.go: UpdateJobReplicaStatuses``). A pod that is deleted before is made again. To Flyte a failed job
    is the user's failure (``kfoperators/common: GetPhaseInfo``), and propeller deletes it with its pods. After success,
    ``clean``, the CleanPodPolicy, says whether running pods are deleted or left alone.
    """
    while True:
        for index, pod in enumerate(pods):
            if pod.deleted and pod.process is None:
                pods[index] = start(index)
        # A deleted pod may live on for its grace period: it has failed all the same.
        over = [(pod.ended or time.time(), index) for index, pod in enumerate(pods) if pod.ended or pod.deleted]
        if over:
            _, index = min(over)
            verdict = verdict_of_job(pods[index], index)
            if verdict or not clean.endswith("NONE"):
                for other in pods:
                    if not other.ended and not other.deleted:
                        other.delete()
            return verdict
        look(pods, aborted)


def verdict_of_job(pod: Pod, index: int) -> Verdict | None:
    """The verdict on a job by the pod that decides it. The operator looks at the pod's phase only."""
    if pod.exit_code == 0 and not pod.deleted:
        return None
    how = "was deleted" if pod.deleted else f"ended by {ending(pod)}"
    return Verdict("user", f"PyTorchJobFailed: 1 Worker replica(s) failed: worker {index} {how}")


def run_job(pods: list[Pod], read: Callable[[], Verdict]) -> Verdict:
    """The verdict on a job by our own clean policy, once all its pods have ended. ``read`` is what propeller makes of
    its outputs; it is called while the other pods may still run."""
    verdict = watch_job(pods, never, "CLEANPOD_POLICY_RUNNING", threading.Event()) or read()
    for pod in pods:
        pod.finish()
    return verdict


def never(index: int) -> Pod:
    raise AssertionError(f"pod {index} was not to be made again")


def look(pods: list[Pod], aborted: threading.Event) -> None:
    if aborted.is_set():
        for pod in pods:
            pod.delete()
        raise Aborted
    for pod in pods:
        if time.time() - pod.started > STUCK_S:
            pod.kill()
            raise AssertionError(f"{pod.name} hangs:\n{pod.said()}")
    time.sleep(LOOK_S)


def ending(pod: Pod) -> str:
    code = pod.exit_code or 0
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
