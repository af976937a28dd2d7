"""A package of one task, one workflow and one launch plan."""

import io
import tarfile
from pathlib import Path

from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.tasks_pb2 import Resources
from google.protobuf.message import Message


def small_package(path: Path) -> None:
    """Write it as a tar file that is not compressed."""
    task, workflow, launch_plan = TaskSpec(), WorkflowSpec(), LaunchPlan()
    task.template.id.name, workflow.template.id.name, launch_plan.id.name = "tasks.a", "workflows.a", "workflows.a"
    task.template.container.image = "example/image"
    task.template.container.resources.limits.add(name=Resources.MEMORY, value="1Gi")
    described: tuple[Message, ...] = (task, workflow, launch_plan)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as file:
        for number, message in enumerate(described, start=1):
            member = tarfile.TarInfo(f"a_{number}.pb")
            content = message.SerializeToString()
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
