"""Inputs of the doctor: an archive of ``pyflyte package``, and the platform's limits per task.

The archive holds protobufs. The limits are FlyteAdmin's ``task_resources.limits``.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any

from flyteidl.admin.launch_plan_pb2 import LaunchPlan, LaunchPlanSpec
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.tasks_pb2 import Resources, TaskTemplate
from flyteidl.core.workflow_pb2 import Node, WorkflowTemplate
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from pydantic import BeforeValidator

from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.placement import NVIDIA
from slipstream.shared.settings import Settings, integral_as_integer, settings

KINDS = {"_1.pb": TaskSpec, "_2.pb": WorkflowSpec, "_3.pb": LaunchPlan}
#: Properties of :class:`TaskUse` that a node may override and that the doctor compares.
OVERRIDDEN = ("retries", "timeout_s", "interruptible", "image", "limits", "requests", "accelerator")
PYTORCHJOB = "pytorch"
#: Name under which Flyte's containers request GPUs; propeller renames this resource only.
GPU = "gpu"
#: Name of a mapped task, which ends in a digest of its bound inputs.
MAPPED = re.compile(r"map_(\w+)_[0-9a-f]{32}-arraynode$")
#: Maximum bytes of an unpacked archive, and of all its headers and protobufs; FlyteAdmin accepts protobufs of up to 4
#: MiB.
MOST_UNPACKED, MOST_READ = 256 << 20, 8 << 20
GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class RegistrationArchive:
    """Protobufs of one archive by name."""

    tasks: Mapping[str, TaskTemplate]
    workflows: Mapping[str, WorkflowTemplate]
    launch_plans: Mapping[str, LaunchPlanSpec]

    def uses(self) -> list[TaskUse]:
        """Return every task as declared, and once more for every node that overrides a compared property."""
        spot = any(workflow.metadata_defaults.interruptible for workflow in self.workflows.values())
        uses = [TaskUse(short_task_name(name), template, None, spot) for name, template in self.tasks.items()]
        for name, workflow in self.workflows.items():
            by_default = workflow.metadata_defaults.interruptible
            for identity, node in workflow_nodes(workflow):
                task = self.tasks.get(node.task_node.reference_id.name)
                if task is not None and (use := TaskUse(f"{name}/{identity}", task, node, by_default)).differs:
                    uses.append(use)
        return uses


def short_task_name(task: str) -> str:
    """Return a task's name such as ``tasks.train.train``; a mapped task loses its digest."""
    return MAPPED.sub(r"\1 (mapped)", task)


@dataclass(frozen=True)
class TaskUse:
    """Task as a workflow node runs it; without a node, as declared."""

    where: str
    task: TaskTemplate
    node: Node | None = None
    #: Default of its workflow, for tasks and nodes that leave ``interruptible`` unset.
    interruptible_by_default: bool = False

    @property
    def differs(self) -> bool:
        """True if the node overrides a property of ``OVERRIDDEN``."""
        declared = TaskUse("", self.task, None, self.interruptible_by_default)
        return any(getattr(self, name) != getattr(declared, name) for name in OVERRIDDEN)

    @property
    def is_job(self) -> bool:
        return self.task.type == PYTORCHJOB

    @property
    def pods(self) -> int:
        """Number of pods that must run at the same time."""
        custom = MessageToDict(self.task.custom)
        return int(custom.get("workerReplicas", {}).get("replicas", 1)) if self.is_job else 1

    @property
    def retries(self) -> int:
        own = self.node.metadata.retries.retries if self.node else 0
        return int(own or self.task.metadata.retries.retries)

    @property
    def timeout_s(self) -> int:
        """Seconds per attempt; 0: no limit."""
        own = self.node.metadata.timeout.seconds if self.node else 0
        return int(own or self.task.metadata.timeout.seconds)

    @property
    def interruptible(self) -> bool:
        metadata = (self.node.metadata if self.node else None, self.task.metadata)
        own = (each.interruptible for each in metadata if each and each.WhichOneof("interruptible_value"))
        return bool(next(own, self.interruptible_by_default))

    @cached_property
    def pod(self) -> dict[str, Any]:
        """Pod spec with Kubernetes' field names; {} for a plain container."""
        spec = MessageToDict(self.task.k8s_pod.pod_spec) if self.task.HasField("k8s_pod") else {}
        return spec if isinstance(spec, dict) else {}

    @property
    def container(self) -> dict[str, Any]:
        """Primary container of the pod spec."""
        containers = self.pod.get("containers") or [{}]
        primary = self.task.config.get("primary_container_name", "primary")
        return next((each for each in containers if each.get("name") == primary), containers[0])

    @property
    def image(self) -> str:
        own = self.node.task_node.overrides.container_image if self.node else ""
        return own or self.task.container.image or self.container.get("image", "")

    @property
    def requests(self) -> dict[str, str]:
        return self._resources("requests")

    @property
    def limits(self) -> dict[str, str]:
        return self._resources("limits")

    def _resources(self, kind: str) -> dict[str, str]:
        """Return quantities by resource name; a GPU requested under Flyte's name is ``gpu``."""
        declared = amounts_by_resource(getattr(self.task.container.resources, kind)) or {
            name: str(value) for name, value in (self.container.get("resources", {}).get(kind) or {}).items()
        }
        own = getattr(self.node.task_node.overrides.resources, kind) if self.node else ()
        return {**declared, **amounts_by_resource(own)}

    @property
    def accelerator(self) -> str:
        own = self.node.task_node.overrides.extended_resources.gpu_accelerator.device if self.node else ""
        return own or self.task.extended_resources.gpu_accelerator.device

    @property
    def gpus(self) -> str:
        """Quantity of GPUs in the limits, which propeller uses; "" without any."""
        return next((self.limits[name] for name in (GPU, NVIDIA) if self.limits.get(name, "0") != "0"), "")


def amounts_by_resource(entries: Iterable[Resources.ResourceEntry]) -> dict[str, str]:
    return {Resources.ResourceName.Name(entry.name).lower().replace("_", "-"): entry.value for entry in entries}


def workflow_nodes(workflow: WorkflowTemplate) -> Iterator[tuple[str, Node]]:
    """Yield all nodes of a workflow with their paths, including nodes in conditionals and array nodes."""
    nodes = list(workflow.nodes)
    if workflow.HasField("failure_node"):
        nodes.append(workflow.failure_node)
    for node in nodes:
        yield from with_inner(node.id, node)


def with_inner(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    yield path, node
    if node.HasField("branch_node"):
        choice = node.branch_node.if_else
        chosen = [choice.case.then_node, *(case.then_node for case in choice.other)]
        if choice.HasField("else_node"):
            chosen.append(choice.else_node)
        for inner in chosen:
            yield from with_inner(f"{path}/{inner.id}", inner)
    if node.HasField("array_node"):
        yield from with_inner(path, node.array_node.node)


def read_package(path: Path) -> RegistrationArchive:
    """Read an archive of ``pyflyte package``.

    Raises ``UserError`` if the file is missing or no such archive.
    """
    tasks: dict[str, TaskTemplate] = {}
    workflows: dict[str, WorkflowTemplate] = {}
    plans: dict[str, LaunchPlanSpec] = {}
    try:
        for message in read_protobufs(path):
            if isinstance(message, TaskSpec):
                tasks[message.template.id.name] = message.template
            elif isinstance(message, WorkflowSpec):
                for template in (message.template, *message.sub_workflows):
                    workflows[template.id.name] = template
            else:
                plans[message.id.name] = message.spec
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected an archive of `pyflyte package`") from None
    except tarfile.ReadError:
        raise UserError(
            f"{path}: not an archive of `pyflyte package` (the tar file is incomplete); package again"
        ) from None
    except Oversized as error:
        raise UserError(f"{path}: {error}; expected an archive of `pyflyte package`; package again") from None
    except (tarfile.TarError, EOFError, zlib.error, DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not an archive of `pyflyte package` ({error}); package again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as an archive of `pyflyte package`: {error}") from None
    if not tasks or "" in (*tasks, *workflows, *plans):
        raise UserError(f"{path}: not an archive of `pyflyte package` (it describes no tasks); package again")
    # Sorted, because archives have no defined order.
    return RegistrationArchive(*(dict(sorted(each.items())) for each in (tasks, workflows, plans)))


class Oversized(Exception):
    """Error for an archive beyond the read limits."""


class UnpackedArchive(io.BufferedIOBase):
    """Unpacked bytes of an archive; raises ``Oversized`` beyond the limits."""

    def __init__(self, file: IO[bytes]) -> None:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        self._file = gzip.GzipFile(fileobj=file) if packed else file
        self._left = MOST_READ

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("the archive's end is not known")
        if offset > MOST_UNPACKED:
            raise Oversized(f"unpacks to more than {MOST_UNPACKED >> 20} MiB")
        return self._file.seek(offset)

    def read(self, size: int | None = None) -> bytes:
        if size is None or not 0 <= size <= self._left:
            raise Oversized(f"describes tasks in more than {MOST_READ >> 20} MiB")
        self._left -= size
        return self._file.read(size)


def read_protobufs(path: Path) -> Iterator[TaskSpec | WorkflowSpec | LaunchPlan]:
    with path.open("rb") as file, tarfile.open(fileobj=UnpackedArchive(file), mode="r:") as archive:
        for member in archive:
            if not 0 <= member.size <= MOST_UNPACKED:  # tarfile would seek back by a negative size and read again
                raise Oversized(f"holds a file of {member.size} bytes")
            kind, content = KINDS.get(member.name[-5:]), archive.extractfile(member) if member.isreg() else None
            if kind and content:
                if member.size > MOST_READ:  # a sparse file is made of zeros, not read
                    raise Oversized(f"describes a task in {member.size} bytes")
                yield kind.FromString(content.read())


def as_text(value: object) -> object:
    return str(integral_as_integer(value)) if type(value) in (int, float) else value


#: Quantity of Kubernetes, also as a number: ``cpu = 2``.
Quantity = Annotated[str, BeforeValidator(as_text)]


@settings
class Limits(Settings):
    """Platform limits per task, with Flyte's defaults; "" or "0": no limit."""

    section = "limits"

    cpu: Quantity = "2"
    memory: Quantity = "1Gi"
    gpu: Quantity = "1"
    ephemeral_storage: Quantity = ""

    def check(self) -> None:
        for resource in LIMITED:
            name = resource.replace("-", "_")
            if parse_kubernetes_quantity(getattr(self, name) or "0") is None:
                raise self.reject(name, 'a quantity of Kubernetes, as "96" or "1000Gi"')

    def of(self, resource: str) -> str:
        """Return the limit of a resource by its name in a pod; "" without a limit.

        Resources unknown to Flyte, such as ``nvidia.com/mig-1g.5gb``, have none.
        """
        name = limit_name(resource)
        limit = getattr(self, name.replace("-", "_")) if name in LIMITED else ""
        return limit if parse_kubernetes_quantity(limit or "0") else ""


#: Resources that Flyte limits, under its names.
LIMITED = ("cpu", "memory", "gpu", "ephemeral-storage")


def limit_name(resource: str) -> str:
    return "gpu" if resource == NVIDIA else resource


def parse_kubernetes_quantity(text: str) -> float | None:
    """Return a quantity as a number; ``500m`` is 0.5, ``1Gi`` 1073741824; None if invalid."""
    try:
        return parse_quantity(text)
    except ValueError:
        return None


@settings
class LimitsFile(Settings):
    """TOML file with a table ``[limits]``."""

    limits: Limits = field(default_factory=Limits)
