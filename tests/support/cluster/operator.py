"""What watches the pods of an attempt: propeller's pod plugin for one, the training operator for a PyTorchJob.

Both return None when the attempt's outputs decide, else the verdict.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from tests.support.cluster.budgets import Verdict
from tests.support.cluster.pods import STUCK_S, Pod

#: Between two looks at the pods.
LOOK_S = 0.02

Start = Callable[[int], Pod]


class Aborted(Exception):
    """Another node failed for good, and with it the execution."""


def watch_pod(pods: list[Pod], aborted: threading.Event) -> Verdict | None:
    """A pod that is deleted or ended by a signal or an error of its own is a failure of the system.

    ``k8s/plugin_manager.go: checkResourcePhase`` does not wait for the end of a pod that is being deleted.
    ``flytek8s/pod_helper.go: DemystifyFailure``: without a reason from the kubelet, which gives none for an exit code,
    and without OOMKilled, any failed pod was "Interrupted". What flytekit catches is no failed pod: it exits 0.
    """
    (pod,) = pods
    while True:
        if pod.deleted:
            return Verdict("system", "the pod was deleted")
        if not pod.running:
            return None if pod.exit_code == 0 else Verdict("system", f"the pod ended by {ending(pod)}")
        look(pods, aborted)


def watch_job(pods: list[Pod], start: Start, clean: str, aborted: threading.Event) -> Verdict | None:
    """A PyTorchJob with an elastic policy (``pytorchjob_controller.go: UpdateJobStatus``, ``common/pod.go``).

    It has succeeded when the first pod exits 0 and has failed when the first fails; a pod that was deleted is made
    anew. To Flyte a failed job is the user's failure (``kfoperators/common: GetPhaseInfo``). ``clean`` is the
    CleanPodPolicy, by which pods that still run are deleted or left alone.
    """
    while True:
        ended = sorted((pod.ended, index) for index, pod in enumerate(pods) if not pod.running)
        for _, index in ended:
            pod = pods[index]
            if pod.deleted:
                pods[index] = start(index)
                continue
            if not clean.endswith("NONE"):
                for other in pods:
                    if other.running:
                        other.delete()
            return None if pod.exit_code == 0 else Verdict("user", f"job failed: worker {index} ended by {ending(pod)}")
        look(pods, aborted)


def run_job(pods: list[Pod], read: Callable[[], Verdict]) -> Verdict:
    """The verdict on a job by our own clean policy, once all its pods have ended. ``read`` is what propeller makes of
    its outputs; it is called while the other pods may still run."""
    verdict = watch_job(pods, never, "CLEANPOD_POLICY_RUNNING", threading.Event()) or read()
    for pod in pods:
        pod.finish()
    return verdict


def never(index: int) -> Pod:
    raise AssertionError(f"pod {index} was not to be made anew")


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
