"""Stores, and clients that were made for other settings."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.shared.storage import (
    Storage,
    azure,
    gcs,
    s3,
    storage_for,
)
from tests.support.faulty_stores import REMOTE


@pytest.fixture
def forgotten() -> Callable[[], None]:
    """Forget the clients, which have read their settings."""

    def forget() -> None:
        for module in (s3, gcs, azure):
            module.client_of.cache_clear()

    return forget


@pytest.fixture(params=["local", *REMOTE])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return storage_for(str(tmp_path / "base"))
    request.getfixturevalue(REMOTE[request.param][0])
    return storage_for(f"{request.param}://bucket/{tmp_path.name}/base")
