"""Packages the workflows as ``pyflyte package`` does and reads back what a cluster would be told."""

from __future__ import annotations

import functools
import os
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte
from flytekit.core.type_engine import DataclassTransformer

from tests.support.processes import FORK

REPOSITORY = Path(__file__).parents[2]
IMAGE = "registry.example/slipstream:test"


@dataclass(frozen=True)
class Package:
    """The protobufs of one package, by name."""

    tasks: dict[str, Any]
    workflows: dict[str, Any]
    launch_plans: dict[str, Any]


def package(directory: Path, profile: str, **environment: str) -> Package:
    """Package for ``profile`` in a process without any Flyte to talk to.

    Raises ``AssertionError`` with what the command said if it failed.
    """
    archive, log = directory / "flyte.tgz", directory / "package.log"
    variables = {**os.environ, "FLYTE_PLATFORM_URL": "127.0.0.1:1", "SLIPSTREAM_PROFILE": profile, **environment}
    process = FORK.Process(target=run_package, args=(archive, log, variables))
    process.start()
    process.join(300)
    assert process.exitcode == 0, log.read_text()
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


def run_package(archive: Path, log: Path, environment: dict[str, str]) -> None:
    """The body of the process: it has flytekit, and imports the workflows for the profile of its environment."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(environment)
    assert not any(name.split(".")[0] == "workflows" for name in sys.modules)
    # Flytekit derives the same schemas of the same dataclasses for every task anew, for most of the time of a package.
    derive = DataclassTransformer.get_literal_type
    DataclassTransformer.get_literal_type = functools.cache(derive)  # type: ignore[method-assign]
    pyflyte.main(["--pkgs", "workflows", "package", "--image", IMAGE, "--force", "--output", str(archive)])
