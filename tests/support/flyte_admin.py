"""A FlyteAdmin on loopback: flyteidl's own services over gRPC, with the rules of Flyte 1.16 for what is registered.

The rules are those of ``flyteadmin/pkg/manager/impl``, the words of refusals those of ``flyteadmin/pkg/errors``: a
version is registered once (the same again already exists, another under its name is refused, with all that differs); a
workflow's tasks and a launch plan's workflow come first; a launch plan is born inactive, and of one name at most one
version is active; code and inputs are uploaded to a signed URL of the store.
"""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import yaml
from flyteidl.admin import execution_pb2, launch_plan_pb2, node_execution_pb2, task_pb2, workflow_pb2
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core import identifier_pb2
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.service import admin_pb2_grpc, auth_pb2, auth_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc, signal_pb2_grpc
from google.protobuf.message import Message

from slipstream.operations.doctor.archive import read_protobufs, workflow_nodes
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from tests.support import REPOSITORY
from tests.support.faulty_s3 import FaultyS3

BUCKET = "flyte"
Key = tuple[str, str, str, str]


def key_of(identifier: identifier_pb2.Identifier) -> Key:
    return (identifier.project, identifier.domain, identifier.name, identifier.version)


def canonical(spec: Message) -> bytes:
    """The bytes by which two registrations are compared; Flyte's compiler sorts the upstream nodes of a workflow."""
    same = type(spec)()
    same.CopyFrom(spec)
    if isinstance(same, WorkflowSpec):
        for template in (same.template, *same.sub_workflows):
            for node in template.nodes:
                node.upstream_node_ids.sort()
    return same.SerializeToString(deterministic=True)


def differences(old: Message, new: Message) -> list[str]:
    """The lines that differ, where FlyteAdmin names paths of its JSON."""
    before, after = str(old).splitlines(), str(new).splitlines()
    return [
        f"/{number}:\n\t- {a} \n\t+ {b}" for number, (a, b) in enumerate(zip(before, after, strict=False)) if a != b
    ]


def tasks_of(spec: WorkflowSpec) -> list[identifier_pb2.Identifier]:
    nodes = [node for template in (spec.template, *spec.sub_workflows) for _, node in workflow_nodes(template)]
    return [node.task_node.reference_id for node in nodes if node.HasField("task_node")]


class FlyteAdmin(
    admin_pb2_grpc.AdminServiceServicer,
    dataproxy_pb2_grpc.DataProxyServiceServicer,
    auth_pb2_grpc.AuthMetadataServiceServicer,
    signal_pb2_grpc.SignalServiceServicer,
):
    """What was registered and started, by name and version. ``endpoint`` is what a client connects to."""

    def __init__(self, bucket: S3Bucket) -> None:
        self.bucket = bucket
        self.endpoint = ""
        self.tasks: dict[Key, task_pb2.TaskSpec] = {}
        self.workflows: dict[Key, WorkflowSpec] = {}
        self.launch_plans: dict[Key, launch_plan_pb2.LaunchPlanSpec] = {}
        self.active: set[Key] = set()
        self.executions: dict[str, execution_pb2.ExecutionCreateRequest] = {}
        #: How every execution stands.
        self.closure = execution_pb2.ExecutionClosure(phase=WorkflowExecution.RUNNING)
        self.calls: list[str] = []
        #: The token that it accepts; empty: no login is needed.
        self.token = ""
        #: Why it refuses every task; empty: it takes them.
        self.refused = ""
        self.lock = threading.Lock()

    def add(self, what: str, kind: dict[Key, Any], request: Any, context: grpc.ServicerContext) -> None:
        with self.lock:
            existing = kind.setdefault(key_of(request.id), request.spec)
        if existing is request.spec:
            return
        if canonical(existing) == canonical(request.spec):
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{what} with identical structure already exists")
        context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{request.id.name} {what} with different structure already exists. (Please register a new version of the "
            f"{what}):\n" + "\n".join(differences(existing, request.spec)),
        )

    def find(self, kind: dict[Key, Any], identifier: identifier_pb2.Identifier, context: grpc.ServicerContext) -> Any:
        if key_of(identifier) not in kind:
            context.abort(grpc.StatusCode.NOT_FOUND, f"missing entity of type {identifier}")
        return kind[key_of(identifier)]

    # Registration

    def CreateTask(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refused)
        self.add("task", self.tasks, request, context)
        return task_pb2.TaskCreateResponse()

    def CreateWorkflow(self, request: Any, context: grpc.ServicerContext) -> Any:
        for identifier in tasks_of(request.spec):
            self.find(self.tasks, identifier, context)
        self.add("workflow", self.workflows, request, context)
        return workflow_pb2.WorkflowCreateResponse()

    def CreateLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:
        inputs = self.find(self.workflows, request.spec.workflow_id, context).template.interface.inputs.variables
        given = {*request.spec.fixed_inputs.literals, *request.spec.default_inputs.parameters}
        schedule = request.spec.entity_metadata.schedule
        if given - set(inputs):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unexpected inputs {given - set(inputs)}")
        required = {n for n, p in request.spec.default_inputs.parameters.items() if p.required}
        unbound = {*required, *(set(inputs) - given)} - {schedule.kickoff_time_input_arg}
        if schedule.WhichOneof("ScheduleExpression") and unbound:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a schedule with unbound required inputs {unbound}")
        self.add("launch plan", self.launch_plans, request, context)
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def UpdateLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.find(self.launch_plans, request.id, context)
        key = key_of(request.id)
        with self.lock:
            self.active = {other for other in self.active if other[:3] != key[:3]}
            if request.state == launch_plan_pb2.ACTIVE:
                self.active.add(key)
        return launch_plan_pb2.LaunchPlanUpdateResponse()

    def CreateUploadLocation(self, request: Any, context: grpc.ServicerContext) -> Any:
        path = f"{request.project}/{request.domain}/{request.filename_root or request.content_md5.hex()}"
        path += f"/{request.filename}"
        signed = self.bucket.s3.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": path})
        return dataproxy_pb2.CreateUploadLocationResponse(signed_url=signed, native_url=f"s3://{BUCKET}/{path}")

    # What `pyflyte run --remote` asks for besides

    def GetTask(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = self.find(self.tasks, request.id, context)
        found = task_pb2.Task(id=request.id)
        found.closure.compiled_task.template.CopyFrom(spec.template)
        return found

    def GetWorkflow(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = self.find(self.workflows, request.id, context)
        found = workflow_pb2.Workflow(id=request.id)
        compiled = found.closure.compiled_workflow
        compiled.primary.template.CopyFrom(spec.template)
        for template in spec.sub_workflows:
            compiled.sub_workflows.add().template.CopyFrom(template)
        for identifier in {key_of(each): each for each in tasks_of(spec)}.values():
            compiled.tasks.add().template.CopyFrom(self.find(self.tasks, identifier, context).template)
        return found

    def GetLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = self.find(self.launch_plans, request.id, context)
        state = launch_plan_pb2.ACTIVE if key_of(request.id) in self.active else launch_plan_pb2.INACTIVE
        closure = launch_plan_pb2.LaunchPlanClosure(state=state, expected_inputs=spec.default_inputs)
        return launch_plan_pb2.LaunchPlan(id=request.id, spec=spec, closure=closure)

    def GetActiveLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:
        active = self.versions({key: key for key in self.launch_plans if key in self.active}, request)
        if not active:
            context.abort(grpc.StatusCode.NOT_FOUND, f"No active launch plan could be found: {request.id.name}")
        return self.GetLaunchPlan(launch_plan_pb2.LaunchPlan(id=active[0]), context)

    def versions(self, kind: dict[Key, Any], request: Any) -> list[identifier_pb2.Identifier]:
        """The versions of a name, newest first."""
        asked = (request.id.project, request.id.domain, request.id.name)
        found = [key for key in reversed(kind) if key[:3] == asked]
        return [identifier_pb2.Identifier(project=p, domain=d, name=n, version=v) for p, d, n, v in found]

    def ListLaunchPlans(self, request: Any, context: grpc.ServicerContext) -> Any:
        found = [launch_plan_pb2.LaunchPlan(id=each) for each in self.versions(self.launch_plans, request)]
        return launch_plan_pb2.LaunchPlanList(launch_plans=found)

    def ListWorkflows(self, request: Any, context: grpc.ServicerContext) -> Any:
        found = [workflow_pb2.Workflow(id=each) for each in self.versions(self.workflows, request)]
        return workflow_pb2.WorkflowList(workflows=found)

    def CreateExecution(self, request: Any, context: grpc.ServicerContext) -> Any:
        plan = self.find(self.launch_plans, request.spec.launch_plan, context)
        missing = {n for n, p in plan.default_inputs.parameters.items() if p.required} - set(request.inputs.literals)
        if missing:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"missing inputs {missing}")
        name = request.name or f"f{len(self.executions):019x}"
        self.executions[name] = request
        created = identifier_pb2.WorkflowExecutionIdentifier(project=request.project, domain=request.domain, name=name)
        return execution_pb2.ExecutionCreateResponse(id=created)

    def GetExecution(self, request: Any, context: grpc.ServicerContext) -> Any:
        spec = self.executions[request.id.name].spec
        return execution_pb2.Execution(id=request.id, spec=spec, closure=self.closure)

    def TerminateExecution(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.closure.phase = WorkflowExecution.ABORTED
        return execution_pb2.ExecutionTerminateResponse()

    def GetExecutionData(self, request: Any, context: grpc.ServicerContext) -> Any:
        return execution_pb2.WorkflowExecutionGetDataResponse()

    def ListNodeExecutions(self, request: Any, context: grpc.ServicerContext) -> Any:
        return node_execution_pb2.NodeExecutionList()

    # What a client asks for to log in

    def GetOAuth2Metadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        return auth_pb2.OAuth2MetadataResponse(token_endpoint="http://127.0.0.1:1/token")

    def GetPublicClientConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        return auth_pb2.PublicClientAuthConfigResponse(client_id="flytectl", authorization_metadata_key="authorization")


Admin = TypeVar("Admin", bound=FlyteAdmin)


class Gate(grpc.ServerInterceptor):
    """Notes every call, and refuses those without the right token; logging in needs none."""

    def __init__(self, admin: FlyteAdmin) -> None:
        self.admin = admin
        self.refusal = grpc.unary_unary_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is expired by 17h3m")
        )

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.admin.calls.append(details.method)
        given = dict(details.invocation_metadata).get("authorization")
        wrong = self.admin.token and given != f"Bearer {self.admin.token}"
        return self.refusal if wrong and "AuthMetadataService" not in details.method else continuation(details)


@contextmanager
def flyte_admin(
    store: FaultyS3, *, token: str = "", certificate: tuple[bytes, bytes] | None = None
) -> Iterator[FlyteAdmin]:
    """A FlyteAdmin that keeps what is uploaded in ``store``."""
    with serving(FlyteAdmin(S3Bucket(store.url, BUCKET)), token, certificate) as admin:
        yield admin


@contextmanager
def serving(admin: Admin, token: str = "", certificate: tuple[bytes, bytes] | None = None) -> Iterator[Admin]:
    """Lets clients connect to ``admin``. With a ``token`` it refuses calls without it; with a ``certificate`` (PEM:
    key, chain) it speaks TLS."""
    admin.token = token
    server = grpc.server(futures.ThreadPoolExecutor(8), interceptors=[Gate(admin)])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(admin, server)
    auth_pb2_grpc.add_AuthMetadataServiceServicer_to_server(admin, server)
    signal_pb2_grpc.add_SignalServiceServicer_to_server(admin, server)
    if certificate:
        port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([certificate]))
    else:
        port = server.add_insecure_port("localhost:0")
    admin.endpoint = f"localhost:{port}"
    server.start()
    try:
        yield admin
    finally:
        server.stop(None).wait()


def register_package(admin: FlyteAdmin, archive: Path, version: str = "v1") -> None:
    """What ``flytectl register files ARCHIVE --archive --version VERSION`` leaves in FlyteAdmin."""
    for message in read_protobufs(archive):
        identify(message, version)
        if isinstance(message, task_pb2.TaskSpec):
            admin.tasks[key_of(message.template.id)] = message
        elif isinstance(message, WorkflowSpec):
            admin.workflows[key_of(message.template.id)] = message
        else:
            admin.launch_plans[key_of(message.id)] = message.spec


def identify(message: Message, version: str) -> None:
    """Fill in the project, the domain and the version of all identifiers in a message."""
    if isinstance(message, identifier_pb2.Identifier):
        message.project, message.domain, message.version = "flytesnacks", "development", version
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        is_map = field.message_type.GetOptions().map_entry
        for each in [value] if isinstance(value, Message) else value.values() if is_map else value:
            if isinstance(each, Message):
                identify(each, version)


def write_config(path: Path, endpoint: str, **admin: Any) -> Path:
    """A configuration file as the repository's own, of another endpoint; ``admin`` adds to that section or replaces."""
    config = yaml.safe_load((REPOSITORY / "flyte.config.yaml").read_text())
    config["admin"] = {**config["admin"], "endpoint": endpoint, **admin}
    path.write_text(yaml.safe_dump(config))
    return path
