"""Registries with promoted models."""

from pathlib import Path

import pytest

from slipstream.pipeline.promote.store import Registry
from tests.support.once import shared_place
from tests.support.promotions import Models, put


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(shared_place(tmp_path_factory) / "models")


@pytest.fixture(params=["directory", "s3"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "directory":
        return Registry(str(tmp_path / "registry"))
    request.getfixturevalue("store")
    return Registry(f"s3://bucket/{tmp_path.name}/models")


@pytest.fixture
def served(models: Models, tmp_path: Path) -> Registry:
    registry = Registry(str(tmp_path / "registry"))
    put(models.trained(150), registry, models.data)
    return registry
