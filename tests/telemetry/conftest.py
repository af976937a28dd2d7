"""Fake NVML library."""

import pytest

from tests.support.fake_nvml import FakeNvml


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(library: FakeNvml) -> FakeNvml:
    """Fake NVML with two fully equipped devices, until a test changes them."""
    library.play()
    return library
