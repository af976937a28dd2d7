"""Packages the workflows as ``pyflyte package`` does and reads back what a cluster would be told."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec

REPOSITORY = Path(__file__).parents[2]
IMAGE = "registry.example/slipstream:test"


@dataclass(frozen=True)
class Package:
    """The protobufs of one package, by name."""

    tasks: dict[str, Any]
    workflows: dict[str, Any]
    launch_plans: dict[str, Any]


def package(directory: Path, profile: str, **environment: str) -> Package:
    """Package for ``profile`` in a process without any Flyte to talk to."""
    archive = directory / "flyte.tgz"
    command = [Path(sys.executable).with_name("pyflyte"), "--pkgs", "workflows", "package", "--image", IMAGE]
    result = subprocess.run(
        [*command, "--force", "--output", archive],
        cwd=REPOSITORY,
        env={**os.environ, "FLYTE_PLATFORM_URL": "127.0.0.1:1", "SLIPSTREAM_PROFILE": profile, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout
    tasks, workflows, plans = {}, {}, {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            content = tar.extractfile(member)
            if content is None:
                continue
            if member.name.endswith("_1.pb"):
                task = TaskSpec.FromString(content.read())
                tasks[task.template.id.name] = task.template
            elif member.name.endswith("_2.pb"):
                workflow = WorkflowSpec.FromString(content.read())
                workflows[workflow.template.id.name] = workflow.template
            elif member.name.endswith("_3.pb"):
                plan = LaunchPlan.FromString(content.read())
                plans[plan.id.name] = plan.spec
    return Package(tasks, workflows, plans)
