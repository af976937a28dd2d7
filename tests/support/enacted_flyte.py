"""A FlyteAdmin that runs executions with the rehearsal's propeller, and a ``kubectl`` that shows its pods."""

import json
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from flyteidl.admin import execution_pb2, node_execution_pb2, project_pb2, task_execution_pb2, version_pb2
from flyteidl.core import catalog_pb2
from flyteidl.core.execution_pb2 import NodeExecution, TaskExecution, WorkflowExecution
from flyteidl.core.literals_pb2 import LiteralMap
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.service import dataproxy_pb2

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.catalog import Catalog
from slipstream.operations.proofs.rehearsal.operator import Aborted
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.propeller import Execution, Literals, NodeFailed
from slipstream.operations.proofs.rehearsal.record import ExecutionRecord, TaskAttempt
from tests.support import fake_kubectl
from tests.support.flyte_admin import FlyteAdmin

PROJECT = "flytesnacks"
KUBECTL = """#!{python}
import json, sys, urllib.request
body = [sys.argv[1:], open(sys.argv[sys.argv.index("--filename") + 1]).read() if "--filename" in sys.argv else ""]
answer = json.load(urllib.request.urlopen("{url}", json.dumps(body).encode()))
print(answer["said"], file=sys.stderr if answer["code"] else sys.stdout)
sys.exit(answer["code"])
"""


@dataclass
class Recovered(Execution):
    """An execution that takes what an ``earlier`` one has finished."""

    earlier: dict[str, Literals] = field(default_factory=dict)

    def task(self, path: str, *rest: Any, **more: Any) -> Literals:
        if path not in self.earlier:
            return super().task(path, *rest, **more)
        self.outputs[path] = self.earlier[path]
        return self.earlier[path]


def as_propeller_says(cause: str) -> str:
    """Return propeller's message for the cause of a failed attempt (``common_operator.go: GetPhaseInfo``)."""
    kind, _, why = cause.partition(": ")
    return (
        f"Job failed:\n\t{kind} - PyTorchJob a7x-n0-0 is failed because {why}." if kind == "PyTorchJobFailed" else cause
    )


class EnactedFlyte(FlyteAdmin):
    """Executions run in threads, their pods as processes of this machine below ``workdir``."""

    def __init__(self, bucket: S3Bucket, workdir: Path) -> None:
        super().__init__(bucket)
        self.workdir = workdir
        self.catalog = Catalog()
        self.running: dict[str, Execution] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.phases: dict[str, WorkflowExecution.Phase.ValueType] = {}
        self.errors: dict[str, str] = {}

    def package_of(self, version: str) -> RegistrationArchive:
        def of(kind: dict[Any, Any]) -> dict[str, Any]:
            return {key[2]: spec for key, spec in kind.items() if key[3] == version}

        tasks = {name: unpacked_in_place(spec.template) for name, spec in of(self.tasks).items()}
        workflows = {name: spec.template for name, spec in of(self.workflows).items()}
        for spec in of(self.workflows).values():
            workflows |= {each.id.name: each for each in spec.sub_workflows}
        return RegistrationArchive(tasks, workflows, of(self.launch_plans))

    def begin(self, name: str, earlier: dict[str, Literals]) -> None:
        request = self.executions[name]
        plan = request.spec.launch_plan
        directory = self.workdir / name
        directory.mkdir()
        record = ExecutionRecord(lambda line: None)
        package, draw = self.package_of(plan.version), random.Random(name)
        chosen = request.spec.interruptible.value if request.spec.HasField("interruptible") else None
        made = Recovered(
            *(name, package, self.bucket, directory, self.catalog, record, draw), earlier=earlier, interruptible=chosen
        )
        self.running[name], self.phases[name] = made, WorkflowExecution.RUNNING

        def body() -> None:
            try:
                made.run(plan.name, request.inputs.literals)
                self.phases[name] = WorkflowExecution.SUCCEEDED
            except Aborted:
                self.phases[name] = WorkflowExecution.ABORTED
            except NodeFailed as error:
                self.phases[name], self.errors[name] = WorkflowExecution.FAILED, str(error)

        self.threads[name] = threading.Thread(target=body)
        self.threads[name].start()

    # Executions

    def CreateExecution(self, request: Any, context: Any) -> Any:
        created = super().CreateExecution(request, context)
        self.begin(created.id.name, {})
        return created

    def RecoverExecution(self, request: Any, context: Any) -> Any:
        self.executions[request.name] = self.executions[request.id.name]
        self.begin(request.name, self.running[request.id.name].outputs)
        return execution_pb2.ExecutionCreateResponse()

    def TerminateExecution(self, request: Any, context: Any) -> Any:
        self.running[request.id.name].abort(Aborted())
        return execution_pb2.ExecutionTerminateResponse()

    def GetExecution(self, request: Any, context: Any) -> Any:
        name = request.id.name
        closure = execution_pb2.ExecutionClosure(phase=self.phases[name])
        if name in self.errors:
            closure.error.message = self.errors[name]
        return execution_pb2.Execution(id=request.id, spec=self.executions[name].spec, closure=closure)

    def ListProjects(self, request: Any, context: Any) -> Any:
        return project_pb2.Projects(projects=[project_pb2.Project(id=PROJECT)])

    def GetVersion(self, request: Any, context: Any) -> Any:
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.8"))

    # Nodes: those of sub-workflows are asked for by the node that they are in

    def attempts(self, name: str) -> dict[str, list[TaskAttempt]]:
        found: dict[str, list[TaskAttempt]] = {}
        for attempt in list(self.running[name].record.attempts):
            found.setdefault(attempt.node, []).append(attempt)
        return found

    def ListNodeExecutions(self, request: Any, context: Any) -> Any:
        name, parent = request.workflow_execution_id.name, request.unique_parent_id
        execution = self.running[name]
        leaves = {*self.attempts(name), *execution.record.hits, *execution.outputs}
        inside = {leaf for leaf in leaves if not parent or leaf.startswith((f"{parent}-", f"{parent}/"))}
        start = len(parent) + 1 if parent else 0
        listed = {leaf[:start] + leaf[start:].replace("/", "-").partition("-")[0]: leaf for leaf in sorted(inside)}
        nodes = [self.node_execution(name, node, leaf != node) for node, leaf in listed.items()]
        return node_execution_pb2.NodeExecutionList(node_executions=nodes)

    def node_execution(self, name: str, node: str, is_parent: bool) -> node_execution_pb2.NodeExecution:
        execution = self.running[name]
        made = node_execution_pb2.NodeExecution(metadata={"is_parent_node": is_parent})
        made.id.node_id, made.id.execution_id.name = node, name
        done = node in execution.outputs
        made.closure.phase = NodeExecution.SUCCEEDED if done else NodeExecution.RUNNING
        its = made.closure.task_node_metadata
        if node in execution.record.cached:
            hit = node in execution.record.hits
            its.cache_status = catalog_pb2.CACHE_HIT if hit else catalog_pb2.CACHE_POPULATED
            its.catalog_key.dataset_id.name = f"flyte_task-{self.task_name(execution, execution.record.cached[node])}"
        return made

    def task_name(self, execution: Execution, short: str) -> str:
        """The record has tasks without their modules."""
        return next((each for each in execution.package.tasks if each.rpartition(".")[2] == short), short)

    def ListTaskExecutions(self, request: Any, context: Any) -> Any:
        its = request.node_execution_id
        execution = self.running[its.execution_id.name]
        listed = []
        for attempt in self.attempts(its.execution_id.name).get(its.node_id, []):
            made = task_execution_pb2.TaskExecution()
            made.id.task_id.name, made.id.retry_attempt = self.task_name(execution, attempt.task), attempt.number
            outcome = attempt.outcome
            if outcome is None:
                made.closure.phase = TaskExecution.RUNNING
            elif outcome.succeeded:
                made.closure.phase = TaskExecution.SUCCEEDED
            else:
                made.closure.phase, made.closure.error.message = TaskExecution.FAILED, as_propeller_says(outcome.cause)
            listed.append(made)
        return task_execution_pb2.TaskExecutionList(task_executions=listed)

    def GetNodeExecutionData(self, request: Any, context: Any) -> Any:
        outputs = self.running[request.id.execution_id.name].outputs.get(request.id.node_id, {})
        return node_execution_pb2.NodeExecutionGetDataResponse(full_outputs=LiteralMap(literals=outputs))

    def CreateDownloadLocation(self, request: Any, context: Any) -> Any:
        where = {"Bucket": self.bucket.name, "Key": self.bucket.key_of(request.native_url)}
        signed = self.bucket.s3.generate_presigned_url("get_object", Params=where)
        return dataproxy_pb2.CreateDownloadLocationResponse(signed_url=signed)

    # What kubectl shows

    def pods(self) -> list[tuple[str, str, PodProcess]]:
        """All pods, each with the execution and the task that it belongs to."""
        return [
            (name, self.task_name(execution, attempt.task), pod)
            for name, execution in self.running.items()
            for attempt in list(execution.record.attempts)
            for pod in list(attempt.pods)
        ]

    def kubectl(self, arguments: list[str], body: str) -> str:
        """Raises ``LookupError`` for what a cluster would refuse."""
        words = [word for word in arguments if not word.startswith("--request-timeout")]
        if words[:2] == ["config", "current-context"]:
            return "enacted"
        if words[:2] == ["auth", "can-i"]:
            return "yes"
        if words[:2] == ["get", "pods"]:
            wanted = dict(each.split("=") for each in words[words.index("--selector") + 1].split(","))
            shown = [shown_pod(*each) for each in self.pods()]
            return listed([pod for pod in shown if wanted.items() <= pod["metadata"]["labels"].items()])
        if words[0] == "get":
            kinds = {"nodes": [fake_kubectl.node("n1", {}, cpu="64", memory="256Gi", disk="1Ti", pods="99")]}
            kinds["customresourcedefinitions"] = [fake_kubectl.definition()]
            kinds["deployments"] = [fake_kubectl.operator()]
            return listed(kinds.get(words[1], []))
        name = words[2].split("/")[6] if words[:2] == ["create", "--raw"] else words[2 if words[0] == "delete" else 1]
        if words[:2] == ["delete", "flyteworkflow"]:
            self.running[name].abort(Aborted())
            return ""
        pod = next((pod for _, _, pod in self.pods() if pod_name(pod) == name), None)
        if pod is None:
            raise LookupError(f'Error from server (NotFound): pods "{name}" not found')
        if words[0] == "logs":
            return pod.said()
        if words[0] == "exec":
            assert words[words.index("--") + 1 :] == ["sh", "-c", "kill -9 -1"]
            for process in psutil.Process(pod.pid).children(recursive=True):
                process.kill()
        elif words[0] == "delete" or json.loads(body)["kind"] == "Eviction":
            pod.delete()
        return ""


def unpacked_in_place(template: TaskTemplate) -> TaskTemplate:
    """The task with its code unpacked into the pod's working directory: this machine's ``/root`` is not the image's."""
    made = TaskTemplate()
    made.CopyFrom(template)
    if made.HasField("container"):
        words = list(made.container.args)
        del made.container.args[:]
        made.container.args.extend(in_place(words))
    for container in made.k8s_pod.pod_spec.get_or_create_list("containers") if made.HasField("k8s_pod") else ():
        container["args"] = in_place(list(container["args"]))
    return made


def in_place(words: list[str]) -> list[str]:
    return ["." if before == "--dest-dir" else word for before, word in pairwise(["", *words])]


def listed(items: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def pod_name(pod: PodProcess) -> str:
    return f"{pod.log.parent.parent.name}-{pod.name.replace('/', '-')}"


def shown_pod(execution: str, task: str, pod: PodProcess) -> dict[str, Any]:
    labels = {"execution-id": execution, "task-name": task.replace(".", "-")}
    metadata = {"name": pod_name(pod), "uid": str(id(pod)), "labels": labels}
    if pod.deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ended = "Succeeded" if pod.exit_code == 0 else "Failed"
    phase = "Pending" if pod.pending else "Running" if pod.running else ended
    return {"metadata": metadata, "spec": {"containers": [{"name": "primary"}]}, "status": {"phase": phase}}


@contextmanager
def kubectl_for(flyte: EnactedFlyte, directory: Path) -> Iterator[str]:
    """A directory for PATH with a ``kubectl`` that shows the pods of ``flyte`` and acts on them."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arguments, body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                answer = {"said": flyte.kubectl(arguments, body), "code": 0}
            except LookupError as error:
                answer = {"said": str(error), "code": 1}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    directory.mkdir()
    script = directory / "kubectl"
    script.write_text(KUBECTL.format(python=sys.executable, url=f"http://127.0.0.1:{server.server_port}"))
    script.chmod(0o755)
    try:
        yield str(directory)
    finally:
        server.shutdown()
