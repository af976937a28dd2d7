"""Rules of the FlyteAdmin on loopback, on which all other tests of registration rely."""

from collections.abc import Iterator

import grpc
import pytest
from flyteidl.admin.task_pb2 import TaskCreateRequest
from flyteidl.admin.workflow_pb2 import WorkflowCreateRequest
from flyteidl.service.admin_pb2_grpc import AdminServiceStub

from tests.support.faulty_s3 import FaultyS3
from tests.support.flyte_admin import flyte_admin


@pytest.fixture
def admin(server: FaultyS3) -> Iterator[AdminServiceStub]:
    with flyte_admin(server) as made, grpc.insecure_channel(made.endpoint) as channel:
        yield AdminServiceStub(channel)


def task(retries: int = 0, version: str = "v1") -> TaskCreateRequest:
    made = TaskCreateRequest()
    made.id.name, made.id.version = "tasks.train.train", version
    made.spec.template.metadata.retries.retries = retries
    return made


def workflow(*upstream: str) -> WorkflowCreateRequest:
    made = WorkflowCreateRequest()
    made.id.name, made.id.version = "workflows.training.train", "v1"
    made.spec.template.nodes.add(id="n2", upstream_node_ids=upstream)
    return made


def test_a_changed_structure_under_one_version_is_refused(admin: AdminServiceStub) -> None:
    admin.CreateTask(task(retries=1))
    with pytest.raises(grpc.RpcError) as refused:
        admin.CreateTask(task(retries=7))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    said = refused.value.details()
    assert said.startswith("tasks.train.train task with different structure already exists. (Please register a new ver")
    assert "- " in said and "retries: 1" in said and "retries: 7" in said
    admin.CreateTask(task(retries=7, version="v2"))


@pytest.mark.parametrize("order", [("n0", "n1"), ("n1", "n0")])
def test_the_same_again_is_there_already_in_whatever_order_its_nodes_are(
    order: tuple[str, str], admin: AdminServiceStub
) -> None:
    admin.CreateWorkflow(workflow("n0", "n1"))
    with pytest.raises(grpc.RpcError) as refused:
        admin.CreateWorkflow(workflow(*order))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
