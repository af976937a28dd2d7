"""Models in service, made once."""

import pytest

from slipstream.pipeline.promote.store import Registry
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.scoring import registry_with_model
from tests.support.toys import images


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry in which a classifier is promoted."""
    return registry_with_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def served_before(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """The classifier with the inputs of earlier packages: times as seconds since 1970."""
    return registry_with_model(tmp_path_factory.mktemp("before"), opset=19)


@pytest.fixture(scope="session")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return registry_with_model(tmp_path_factory.mktemp("regression"), "regression")


@pytest.fixture(scope="session")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    place = tmp_path_factory.mktemp("images")
    data, registry = images(place / "prepared"), Registry(str(place / "registry"))
    put(package(place / "package", data), registry, data)
    return registry


@pytest.fixture(scope="session")
def without_marks(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """Of a model to which no text means missing, so that its raw model cannot be told of a missing one."""
    return registry_with_model(tmp_path_factory.mktemp("without-marks"), missing=[])
