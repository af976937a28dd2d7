"""Client of a Flyte backend that uploads files and starts, polls and ends executions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from typing import Any

import click
import grpc
import requests
from flyteidl.admin import execution_pb2, node_execution_pb2, task_execution_pb2
from flyteidl.core import catalog_pb2, identifier_pb2
from flyteidl.core.execution_pb2 import NodeExecution, TaskExecution, WorkflowExecution
from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flyteidl.service import dataproxy_pb2
from flytekit.clients.auth.exceptions import AccessTokenNotFoundError, AuthenticationError, AuthenticationPending
from flytekit.clis.sdk_in_container import constants
from flytekit.configuration import Config
from flytekit.remote import FlyteRemote

from slipstream.shared.artifacts.format import MANIFEST, Manifest
from slipstream.shared.errors import UserError

#: Size of a page of a listing; a main job has far fewer nodes.
PAGE = 100
TIMEOUT_S = 60


@dataclass(frozen=True)
class ObservedAttempt:
    """Attempt at a task; ``error`` is empty unless it failed."""

    number: int
    phase: TaskExecution.Phase.ValueType
    error: str


@dataclass(frozen=True)
class ObservedNode:
    """Node of an execution that runs a task, or takes its outputs from the cache."""

    id: identifier_pb2.NodeExecutionIdentifier
    phase: NodeExecution.Phase.ValueType
    cache: catalog_pb2.CatalogCacheStatus.ValueType
    #: Name of the task, such as ``tasks.train.train``; empty until it is known.
    task: str
    attempts: list[ObservedAttempt] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        return self.phase in (NodeExecution.SUCCEEDED, NodeExecution.RECOVERED)

    @property
    def hit(self) -> bool:
        return self.cache == catalog_pb2.CACHE_HIT


class FlyteBackend:
    """Project and domain of a Flyte, used by ``principal``.

    All methods raise ``UserError`` if Flyte cannot be reached or refuses.
    """

    def __init__(self, config: Path, project: str, domain: str, principal: str) -> None:
        self.config, self.principal = config, principal
        self.project, self.domain = project, domain
        settings = Config.auto(str(config))
        self.endpoint = settings.platform.endpoint
        self.remote = FlyteRemote(settings, default_project=project, default_domain=domain)

    @contextmanager
    def explained(self) -> Iterator[Any]:
        """Yield the client of FlyteAdmin's own messages, and explain its errors."""
        try:
            yield self.remote.client.raw
        except UserError:
            raise
        except Exception as error:
            raise line_about(error, self.endpoint) or error from None

    def version(self) -> str:
        """Return the version of the backend. Raises ``UserError`` if it lacks the project."""
        with self.explained() as client:
            projects = {each.id for each in client.list_projects().projects}
            version = str(self.remote.client.get_control_plane_version())
        if self.project not in projects:
            there = ", ".join(sorted(projects)) or "none"
            raise UserError(f"Flyte at {self.endpoint} has no project {self.project!r}; expected one of {there}")
        return version

    def upload(self, file: Path, folder: str) -> str:
        """Upload a file to Flyte's store and return its address."""
        with self.explained():
            return self.remote.upload_file(file, filename_root=folder)[1]

    # Executions

    def id_of(self, name: str) -> identifier_pb2.WorkflowExecutionIdentifier:
        return identifier_pb2.WorkflowExecutionIdentifier(project=self.project, domain=self.domain, name=name)

    def start(self, name: str, workflow: str, version: str, inputs: Mapping[str, Literal]) -> None:
        """Start an execution with inputs; its launch plan has the name of the workflow."""
        plan = identifier_pb2.Identifier(
            resource_type=identifier_pb2.LAUNCH_PLAN,
            project=self.project,
            domain=self.domain,
            name=workflow,
            version=version,
        )
        metadata = execution_pb2.ExecutionMetadata(principal=self.principal)
        request = execution_pb2.ExecutionCreateRequest(
            project=self.project,
            domain=self.domain,
            name=name,
            spec=execution_pb2.ExecutionSpec(launch_plan=plan, metadata=metadata),
            inputs=LiteralMap(literals=inputs),
        )
        with self.explained() as client:
            client.create_execution(request)

    def recover(self, name: str, into: str) -> None:
        """Start an execution that continues where a failed one ended."""
        with self.explained() as client:
            client.recover_execution(execution_pb2.ExecutionRecoverRequest(id=self.id_of(name), name=into))

    def end(self, name: str, why: str) -> None:
        request = execution_pb2.ExecutionTerminateRequest(id=self.id_of(name), cause=f"{self.principal}: {why}")
        with self.explained() as client:
            client.terminate_execution(request)

    def execution(self, name: str) -> execution_pb2.ExecutionClosure:
        with self.explained() as client:
            found: execution_pb2.Execution = client.get_execution(
                execution_pb2.WorkflowExecutionGetRequest(id=self.id_of(name))
            )
        return found.closure

    def nodes(self, name: str, parent: str = "") -> list[ObservedNode]:
        """Return the nodes of an execution, including those of sub-workflows, branches and map tasks."""
        request = node_execution_pb2.NodeExecutionListRequest(
            workflow_execution_id=self.id_of(name), limit=PAGE, unique_parent_id=parent
        )
        with self.explained() as client:
            listed = client.list_node_executions_paginated(request).node_executions
        found: list[ObservedNode] = []
        for each in listed:
            if each.metadata.is_parent_node:
                found += self.nodes(name, each.id.node_id)
            elif each.id.node_id not in ("start-node", "end-node"):
                found.append(self.node(each))
        return found

    def node(self, execution: node_execution_pb2.NodeExecution) -> ObservedNode:
        request = task_execution_pb2.TaskExecutionListRequest(node_execution_id=execution.id, limit=PAGE)
        with self.explained() as client:
            tasks = client.list_task_executions_paginated(request).task_executions
        its = execution.closure.task_node_metadata
        task = tasks[0].id.task_id.name if tasks else its.catalog_key.dataset_id.name.removeprefix("flyte_task-")
        attempts = [ObservedAttempt(t.id.retry_attempt, t.closure.phase, t.closure.error.message) for t in tasks]
        ordered = sorted(attempts, key=lambda attempt: attempt.number)
        return ObservedNode(execution.id, execution.closure.phase, its.cache_status, task, ordered)

    def artifact(self, nodes: Iterable[ObservedNode], kind: str) -> dict[str, str]:
        """Return the files of a stage's artifact, with the SHA-256 from its manifest.

        Empty if none of the nodes made such an artifact.
        """
        for node in nodes:
            with self.explained() as client:
                data = client.get_node_execution_data(node_execution_pb2.NodeExecutionGetDataRequest(id=node.id))
            blob = data.full_outputs.literals["artifact"].scalar.blob
            if blob.metadata.type.format == kind:
                address = f"{blob.uri.rstrip('/')}/{MANIFEST}"
                files = Manifest.parse(self.download(address), address).files
                return {name: record.sha256 for name, record in files.items()}
        return {}

    def download(self, address: str) -> bytes:
        """Return a file of Flyte's store, by an address that Flyte signs."""
        with self.explained() as client:
            signed = client.create_download_location(dataproxy_pb2.CreateDownloadLocationRequest(native_url=address))
        try:
            answer = requests.get(signed.signed_url, timeout=TIMEOUT_S)
            answer.raise_for_status()
        except requests.RequestException as error:
            what = type(error).__name__ if error.response is None else f"status {error.response.status_code}"
            raise UserError(f"{address}: cannot be read by the address that Flyte signs for it ({what})") from None
        return answer.content

    def runs(self, name: str) -> bool:
        """Return True until an execution has ended."""
        running = (WorkflowExecution.UNDEFINED, WorkflowExecution.QUEUED, WorkflowExecution.RUNNING)
        return self.execution(name).phase in running


LOGIN = (AccessTokenNotFoundError, AuthenticationError, AuthenticationPending)
FIX_LOGIN = "log in again, or fix `authType` and its settings in the configuration file"

#: Module of flytekit that makes all calls to the backend.
REMOTE = "flytekit.remote.remote"


def explain_remote_error(error: Exception, context: click.Context | None) -> UserError | None:
    """Return a one-line error if a call of ``pyflyte`` to the backend caused ``error``, else None."""
    if not any(frame.f_globals.get("__name__") == REMOTE for frame, _ in walk_tb(error.__traceback__)):
        return None
    file = (context.obj or {}).get(constants.CTX_CONFIG_FILE) if context else None
    return line_about(error, Config.auto(file).platform.endpoint)


def line_about(error: Exception, endpoint: str) -> UserError | None:
    """Return a one-line error for an error of a call to the backend, or None if the cause is elsewhere."""
    for cause in causes(error):
        if isinstance(cause, grpc.RpcError) and isinstance(cause, grpc.Call):
            return UserError(f"Flyte at {endpoint} {said(cause.code(), cause.details() or '')}")
        if isinstance(cause, requests.RequestException):
            url = cause.request.url if cause.request else None
            store = str(url or "its store").partition("?")[0]
            return UserError(
                f"Flyte at {endpoint} is there, but the upload to {store} failed ({type(cause).__name__}); "
                "that address has to be reachable from here"
            )
        if isinstance(cause, (*LOGIN, OSError)):  # an OSError: the program that `admin.command` names
            return UserError(f"Flyte at {endpoint} wants a login, which failed ({cause}); {FIX_LOGIN}")
    return None


def causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def said(code: grpc.StatusCode, details: str) -> str:
    """Return the meaning of the status of a call, and a fix."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"has a certificate that is not trusted ({details}); name its authority in `admin.caCertFilePath`"
    if "WRONG_VERSION_NUMBER" in details:
        return f"does not speak TLS ({details}); if it is a sandbox, set `admin.insecure: true`"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"cannot be reached ({details}); check `admin.endpoint`, and remove `admin.insecure` if it speaks TLS"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"answers, but not as Flyte does ({details}); check `admin.endpoint`"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"does not accept the login ({details}); {FIX_LOGIN}"
    what, another, _ = details.partition(" with different structure already exists")
    if another:  # all differences follow as JSON
        return (
            f"has another {what} under this version, of another profile, other schedules, another image or other code; "
            "leave `--version` out, as it then follows from all of these, or give a new one"
        )
    return f"refused: {details} ({code.name})"
