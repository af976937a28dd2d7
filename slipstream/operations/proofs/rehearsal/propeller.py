"""Execution of a packaged workflow, node by node, with inputs from the bindings."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from flyteidl.core.literals_pb2 import Literal, LiteralMap, Scalar, Void
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.workflow_pb2 import ArrayNode, Node, NodeMetadata, WorkflowTemplate

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.processes import free_port
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.catalog import Catalog, cache_key
from slipstream.operations.proofs.rehearsal.kills import Kills
from slipstream.operations.proofs.rehearsal.nodes import START, decide, needed, resolve_all, upstream
from slipstream.operations.proofs.rehearsal.operator import Aborted, Namespace, create_pods, look, watch_job, watch_pod
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, RetryBudget, read_outcome
from slipstream.operations.proofs.rehearsal.pods import PodProcess, with_secret_files
from slipstream.operations.proofs.rehearsal.record import ExecutionRecord, TaskAttempt
from slipstream.operations.proofs.rehearsal.rendering import (
    granted_secrets,
    primary_container,
    raw_output,
    rendered,
    values_of,
)
from slipstream.operations.proofs.rehearsal.rounds import OPERATOR_TIMEOUT_S, RETRIES, JobNotStarted, PropellerRounds
from slipstream.shared.artifacts.workspaces import HOMES

Literals = dict[str, Literal]
#: Output of an element that failed.
VOID = Literal(scalar=Scalar(none_type=Void()))
#: Prefix of all raw output in the bucket.
RAW = "raw"
#: Tasks that have a checkpoint directory.
TRAININGS = {"train", "fine_tune"}
#: Maximum seconds until propeller looks at a job that has ended, and from a failed attempt to the next: pods of the
#: failed attempt may still run then.
LOOK_S, AGAIN_S = 1.0, 2.5


def deadline_of(given: Mapping[str, Any]) -> float:
    """Return the deadline of a pod or a job in seconds; infinity if it has none."""
    return float(given["activeDeadlineSeconds"]) if "activeDeadlineSeconds" in given else math.inf


class NodeFailed(Exception):
    """Error of a node that failed for good; ``log`` is the output of its last pods."""

    def __init__(self, node: str, outcome: AttemptOutcome, log: str) -> None:
        super().__init__(f"{node}: {outcome.cause} ({outcome.payer}'s budget)\n{log}")
        self.node, self.outcome = node, outcome


@dataclass
class Execution:
    """Execution ``name`` of a workflow of ``package``. ``catalog`` outlives it.

    ``admit`` is the scheduler's; the default has room for all pods. ``event`` reports the begin and the end of an
    attempt to FlyteAdmin, or raises ``AdminUnavailable``. ``operator_timeout_s`` is ``plugins.kf-operator.timeout``.
    """

    name: str
    package: RegistrationArchive
    bucket: S3Bucket
    workdir: Path
    catalog: Catalog
    record: ExecutionRecord
    draw: random.Random
    kills: Kills = field(default_factory=Kills)
    admit: Callable[[PodProcess], None] | None = None
    event: Callable[[], None] = lambda: None
    max_workflow_retries: int = RETRIES
    overwrite_cache: bool = False
    namespace: Namespace = field(default_factory=Namespace)
    operator_timeout_s: float = OPERATOR_TIMEOUT_S
    #: Choice of the execution (``pyflyte run --interruptible``); None leaves it to the workflow.
    interruptible: bool | None = None
    #: Secrets of the namespace, by ``GROUP/KEY``.
    secrets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aborted = threading.Event()
        self.rounds = PropellerRounds(self.max_workflow_retries, self.aborted, self.abort)
        self.failure: BaseException | None = None
        self.numbers = count()
        self.pods: list[PodProcess] = []
        #: Outputs of all task nodes, by node.
        self.outputs: dict[str, Literals] = {}

    def run(self, workflow: str, inputs: Mapping[str, Literal]) -> Literals:
        """Run a workflow and return its outputs. No pod is left when it returns or raises.

        Raises ``NodeFailed`` or ``RetriesExhausted``.
        """
        if self.interruptible is None:
            self.interruptible = self.package.workflows[workflow].metadata_defaults.interruptible
        defaults = self.package.launch_plans[workflow].default_inputs.parameters
        given = {name: inputs.get(name, parameter.default) for name, parameter in defaults.items()}
        try:
            return self.workflow(self.package.workflows[workflow], given, "")
        except Aborted:
            assert self.failure, "only a failure aborts"
            raise self.failure from None
        finally:
            self.record.ended = time.time()
            for pod in self.pods:
                if not pod.ended:
                    pod.kill()
                pod.waiting.join()

    def workflow(self, template: WorkflowTemplate, inputs: Literals, path: str) -> Literals:
        outputs: dict[str, Literals] = {START: inputs}
        self.nodes(template.nodes, outputs, path)
        return resolve_all(template.outputs, outputs, self.draw)

    def nodes(self, nodes: Iterable[Node], outputs: dict[str, Literals], path: str) -> None:
        """Run every node as soon as its upstream nodes have ended. The first failure for good ends the others."""
        left = {node.id: node for node in nodes}
        running: dict[Future[Literals], str] = {}
        with ThreadPoolExecutor(max_workers=max(1, len(left))) as pool:
            try:
                while left or running:
                    for node in [node for node in left.values() if upstream(node) <= outputs.keys()]:
                        running[pool.submit(self.node, left.pop(node.id), outputs, path)] = node.id
                    assert running, f"a circle among {sorted(left)}"
                    for ended in wait(running, return_when=FIRST_COMPLETED).done:
                        outputs[running.pop(ended)] = ended.result()
            except BaseException as error:  # of a node, or from the keyboard
                self.abort(error)
                raise

    def abort(self, error: BaseException) -> None:
        """End everything that still runs. The execution fails with the first error."""
        self.failure = self.failure or error
        self.aborted.set()

    def node(self, node: Node, outputs: dict[str, Literals], path: str) -> Literals:
        """Run a node. ``outputs`` are the outputs of its workflow so far, and ``path`` is the workflow's prefix."""
        inputs = resolve_all(node.inputs, outputs, self.draw)
        here = f"{path}{node.id}"
        kind = node.WhichOneof("target")
        if kind == "task_node":
            return self.task(here, self.template_of(node), node.metadata, inputs)
        if kind == "array_node":
            return self.array(here, node.array_node, inputs)
        if kind == "branch_node":
            return self.node(decide(node.branch_node.if_else, inputs), outputs, f"{here}-")
        if kind == "workflow_node" and node.workflow_node.HasField("sub_workflow_ref"):
            name = node.workflow_node.sub_workflow_ref.name
            return self.workflow(self.package.workflows[name], inputs, f"{here}-")
        raise NotImplementedError(f"{here}: a {kind}")

    def template_of(self, node: Node) -> TaskTemplate:
        return self.package.tasks[node.task_node.reference_id.name]

    def array(self, path: str, array: ArrayNode, inputs: Literals) -> Literals:
        """Run a map task (``array/handler.go``): every element is a node with its own retries and cache.

        All pods get the whole lists and choose by their index. Elements may fail as far as the success criteria allow.
        """
        mapped = [name for name in inputs if name not in array.bound_inputs]
        (size,) = {len(inputs[name].collection.literals) for name in mapped}
        template, metadata = self.template_of(array.node), array.node.metadata
        names = list(template.interface.outputs.variables)
        failed: list[NodeFailed] = []

        def element(index: int) -> Literals:
            own = {name: inputs[name].collection.literals[index] for name in mapped}
            try:
                return self.task(f"{path}/{index}", template, metadata, {**inputs, **own}, index, inputs)
            except NodeFailed as error:
                failed.append(error)
                if size - len(failed) < needed(array, size):
                    self.abort(error)
                    raise
                return dict.fromkeys(names, VOID)

        with ThreadPoolExecutor(max_workers=array.parallelism or max(1, size)) as pool:
            made = list(pool.map(element, range(size)))
        collected: Literals = {}
        for name in names:
            collected[name] = Literal()
            collected[name].collection.SetInParent()
            collected[name].collection.literals.extend(each[name] for each in made)
        return collected

    def task(
        self,
        path: str,
        template: TaskTemplate,
        metadata: NodeMetadata,
        inputs: Literals,
        index: int | None = None,
        lists: Literals | None = None,
    ) -> Literals:
        """Return the outputs of a task from the cache or from a pod; ``index`` and ``lists`` belong to a map task."""
        work = (path, template, metadata, inputs if lists is None else lists, index)
        if not template.metadata.discoverable:
            self.outputs[path] = self.attempts(*work)
            return self.outputs[path]
        key = cache_key(template, inputs)
        turn = self.catalog.reservation(key) if template.metadata.cache_serializable else nullcontext()
        with turn:
            found = None if self.overwrite_cache else self.catalog.find(key)
            self.record.looked_up(path, template.id.name, found is not None)
            if found is None:
                inputs_of = f"{self.name}/{path}/inputs.pb"
                with self.rounds.reading(lambda: self.bucket.message(inputs_of, LiteralMap)):
                    found = self.attempts(*work)
                self.catalog.keep(key, found)
        self.outputs[path] = found
        return found

    def attempts(
        self, path: str, template: TaskTemplate, metadata: NodeMetadata, inputs: Literals, index: int | None
    ) -> Literals:
        """Make attempts until one succeeds or a budget is spent. Raises ``NodeFailed``."""
        home = f"{self.name}/{path}"
        given = LiteralMap(literals=inputs).SerializeToString()
        self.rounds.through(lambda: self.bucket.write(f"{home}/inputs.pb", given))
        own = metadata.interruptible if metadata.WhichOneof("interruptible_value") else self.interruptible
        budget = RetryBudget(metadata.retries.retries, bool(own))
        for number in count():
            replicas = int(template.custom["workerReplicas"]["replicas"]) if template.type == "pytorch" else 1
            self.rounds.through(self.event)
            attempt = self.record.begin(path, template.id.name, number, budget, replicas)
            outcome, outputs = self.attempt(attempt, template, home, replicas, index)
            self.rounds.through(self.event)
            again = outcome.succeeded or budget.spend(outcome)
            self.record.end(attempt, outcome)
            if outcome.succeeded:
                return outputs
            if not again:
                logs = [pod.said()[-4000:] for pod in attempt.pods]
                raise NodeFailed(path, outcome, "\n".join(logs))
            time.sleep(self.draw.uniform(0, AGAIN_S))
        raise AssertionError("unreachable")

    def attempt(
        self, attempt: TaskAttempt, template: TaskTemplate, home: str, replicas: int, index: int | None
    ) -> tuple[AttemptOutcome, Literals]:
        """Run the pods of one attempt and return its outcome."""
        place = f"{home}/{attempt.number}"
        raw, before = (
            raw_output(self.bucket.uri(RAW), self.name, attempt.node, number)
            for number in (attempt.number, attempt.number - 1)
        )
        container = primary_container(template, attempt.on_spot)
        secret_variables, secret_files = granted_secrets(template, self.secrets)
        values = values_of(
            self.bucket.uri(f"{home}/inputs.pb"), self.bucket.uri(place), raw, before if attempt.number else ""
        )
        environment = {
            **container.environment,
            **secret_variables,
            **self.bucket.environment,
            "FLYTE_INTERNAL_EXECUTION_ID": self.name,
            "FLYTE_INTERNAL_EXECUTION_PROJECT": "rehearsal",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
            "FLYTE_INTERNAL_TASK_NAME": template.id.name,
            "FLYTE_ATTEMPT_NUMBER": str(attempt.number),
        }
        if index is not None:
            environment["BATCH_JOB_ARRAY_INDEX_VAR_NAME"] = "FLYTE_K8S_ARRAY_INDEX"
            environment["FLYTE_K8S_ARRAY_INDEX"] = str(index)
        job = template.type == "pytorch"
        if job:
            elastic = template.custom["elasticConfig"]
            environment |= {
                "PYTHONUNBUFFERED": "1",
                "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
                "PET_RDZV_BACKEND": str(elastic["rdzvBackend"]),
                "PET_NNODES": f"{int(elastic['minReplicas'])}:{int(elastic['maxReplicas'])}",
                "PET_NPROC_PER_NODE": str(int(elastic["nprocPerNode"])),
            }

        def start(replica: int) -> PodProcess:
            name = f"{attempt.node}-{attempt.number}" + (f"-worker-{replica}" if job else "")
            directory = self.workdir / f"p{next(self.numbers)}"
            command, (*_, grace_s, tolerations) = rendered(container.command, values), container
            own = {**environment, "HOSTNAME": f"{self.name}-{name}".replace("/", "-")}
            pod = PodProcess.start(
                name,
                with_secret_files(command, secret_files, directory),
                own,
                directory,
                grace_s,
                tolerations,
                self.admit,
            )
            self.pods.append(pod)
            attempt.pods.append(pod)
            return pod

        def late(seconds: float) -> None:
            look(pods, self.aborted)
            if job and seconds > self.operator_timeout_s:
                what = "kubeflow operator hasn't updated the pytorch custom resource since creation time"
                self.rounds.fail(JobNotStarted(what))

        pods: list[PodProcess] = []
        written = [place, self.bucket.key_of(raw)]
        if attempt.task in TRAININGS:  # one at a time writes there
            written.append(f"{RAW}/{HOMES}")
        for prefix in written:
            self.kills.watch(f"/{self.bucket.name}/{prefix}/", attempt.node, attempt.number, pods)
        create_pods(pods, replicas, lambda missing: self.namespace.create(missing, start), late)
        if job:
            policy = template.custom["runPolicy"]
            outcome = watch_job(pods, start, str(policy["cleanPodPolicy"]), self.aborted, deadline_of(policy))
            time.sleep(self.draw.uniform(0, LOOK_S))
        else:
            outcome = watch_pod(pods, self.aborted, deadline_of(template.k8s_pod.pod_spec))
        if outcome:
            return outcome, {}
        return self.rounds.through(lambda: read_outcome(self.bucket, place))
