"""Package that the tests of the doctor damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.doctor.archive import Package, read_package
from tests.support.package import package


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pyflyte package`` writes for two nodes of eight GPUs on spot."""
    directory = tmp_path_factory.mktemp("doctor")
    package(directory, "a100-spot")
    return directory / "flyte.tgz"


@pytest.fixture
def healthy(archive: Path) -> Package:
    """Package without findings."""
    return read_package(archive)
