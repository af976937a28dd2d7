"""A package as the tests of the doctor break it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.doctor.archive import Package, read_package
from tests.support.package import package

Break = Callable[[Package], None]


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pyflyte package`` writes for two nodes of eight GPUs on spot."""
    directory = tmp_path_factory.mktemp("doctor")
    package(directory, "a100-spot")
    return directory / "flyte.tgz"


@pytest.fixture
def healthy(archive: Path) -> Package:
    """The package with a disk request for every pod and time for every retry: nothing is left to find."""
    made = copy.deepcopy(read_package(archive))
    for task in made.tasks.values():
        if task.HasField("k8s_pod"):
            for kind in ("requests", "limits"):
                task.k8s_pod.pod_spec["containers"][0]["resources"][kind]["ephemeral-storage"] = "120Gi"
        task.metadata.timeout.seconds = 86_400
    for workflow in made.workflows.values():
        for node in workflow.nodes:
            for inner in (node, node.array_node.node):
                if inner.metadata.HasField("timeout"):
                    inner.metadata.timeout.seconds = 86_400
    return made
