"""Workflows of shell scripts, whose pods finish within seconds."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.admin.launch_plan_pb2 import LaunchPlanSpec
from flyteidl.core.literals_pb2 import LiteralMap
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.workflow_pb2 import WorkflowTemplate

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.catalog import Catalog
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.propeller import Execution
from slipstream.operations.proofs.rehearsal.record import ExecutionRecord

NAME = "workflow"
#: The only node.
NODE = "n0"
#: Of a job of two pods, as the plugin writes it.
JOB: dict[str, dict[str, Any]] = {
    "workerReplicas": {"replicas": 2},
    "runPolicy": {"cleanPodPolicy": "CLEANPOD_POLICY_ALL"},
    "elasticConfig": {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 2, "nprocPerNode": 1},
}


@dataclass(frozen=True)
class Shell:
    """A task whose pods run ``script``. What they would write is there from the beginning."""

    script: str
    cached: bool = False
    job: bool = False
    retries: int = 0
    interruptible: bool = False
    #: Seconds after which the pod or the job ends; 0: no deadline.
    deadline_s: float = 0

    def package(self) -> RegistrationArchive:
        task = TaskTemplate(type="pytorch" if self.job else "python-task")
        task.id.name = "script"
        task.metadata.discoverable, task.metadata.discovery_version = self.cached, "1"
        task.container.command.extend(["sh", "-c", self.script])
        if self.job:
            deadline = {"activeDeadlineSeconds": self.deadline_s} if self.deadline_s else {}
            task.custom.update({**JOB, "runPolicy": {**JOB["runPolicy"], **deadline}})
        elif self.deadline_s:
            containers = [{"name": "primary", "command": ["sh", "-c", self.script]}]
            task.k8s_pod.pod_spec.update({"containers": containers, "activeDeadlineSeconds": self.deadline_s})
            task.config["primary_container_name"] = "primary"
        workflow = WorkflowTemplate()
        node = workflow.nodes.add(id=NODE)
        node.task_node.reference_id.name = task.id.name
        node.metadata.retries.retries = self.retries
        workflow.metadata_defaults.interruptible = self.interruptible
        return RegistrationArchive({task.id.name: task}, {NAME: workflow}, {NAME: LaunchPlanSpec()})

    def execution(self, bucket: S3Bucket, workdir: Path, name: str = "run", **settings: Any) -> Execution:
        for attempt in range(self.retries + 5):
            bucket.write(f"{name}/{NODE}/{attempt}/outputs.pb", LiteralMap().SerializeToString())
        (workdir / name).mkdir()
        record, draw = ExecutionRecord(lambda line: None), random.Random(0)
        return Execution(name, self.package(), bucket, workdir / name, Catalog(), record, draw, **settings)


@contextmanager
def under_way(execution: Execution) -> Iterator[Future[Any]]:
    """Run the execution during the block."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(execution.run, NAME, {})
        try:
            yield running
        finally:
            running.exception()  # no pod is left


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running_pod(execution: Execution, number: int) -> PodProcess:
    """The pod of this number of an execution, once it runs."""
    until(lambda: len(execution.pods) > number and execution.pods[number].running)
    return execution.pods[number]


def until_ready(pod: PodProcess) -> None:
    """Until its script has said "ready"."""
    until(lambda: "ready" in pod.said())
