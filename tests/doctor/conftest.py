"""Package that the tests of the doctor damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.doctor.archive import RegistrationArchive, read_package


@pytest.fixture(scope="session")
def archive(archive_for: Callable[[str], Path]) -> Path:
    """What ``pyflyte package`` writes for two nodes of eight GPUs on spot."""
    return archive_for("a100-spot")


@pytest.fixture
def healthy(archive: Path) -> RegistrationArchive:
    """Package without findings."""
    return read_package(archive)
