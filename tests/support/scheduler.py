"""Simple kube-scheduler: nodes with room for a number of pods."""

import threading
from dataclasses import dataclass, field

from slipstream.operations.proofs.rehearsal.pods import PodProcess, Toleration


@dataclass
class SchedulerNode:
    """A node of the cluster. With a ``taint`` (a key, of effect NoSchedule) it is only for pods that tolerate it."""

    name: str
    room: int
    taint: str = ""
    pods: list[PodProcess] = field(default_factory=list)

    def takes(self, pod: PodProcess) -> bool:
        free = sum(each.running for each in self.pods) < self.room
        return free and (not self.taint or any(tolerates(each, self.taint) for each in pod.tolerations))


def tolerates(toleration: Toleration, taint: str) -> bool:
    return toleration.get("key") == taint and toleration.get("effect", "NoSchedule") == "NoSchedule"


class Scheduler:
    """Places single pods of any job.

    Without room, a pod stays Pending until another has ended, its grace period included. The pod that has waited
    longest goes first.
    """

    def __init__(self, *machines: SchedulerNode) -> None:
        self.machines = machines
        self.waiting: list[PodProcess] = []
        self.lock = threading.Lock()

    def admit(self, pod: PodProcess) -> None:
        pod.left = self.place
        with self.lock:
            self.waiting.append(pod)
        self.place()

    def place(self) -> None:
        with self.lock:
            self.waiting = [pod for pod in self.waiting if pod.pending]
            for pod in self.waiting:
                machine = next((each for each in self.machines if each.takes(pod)), None)
                if machine:
                    machine.pods.append(pod)
                    pod.node = machine.name
                    pod.begin()
