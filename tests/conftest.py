"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.storage import retry, s3
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3
from tests.support.faulty_stores import REMOTE, Remote, azurite, connection_string, faulty_azure, faulty_google

#: The directories whose files take minutes. They come first, so that in the end no process waits long for another.
LONGEST = ("command_line", "registration", "pods", "survival", "benchmarks", "train", "collectives", "export")
#: The directory whose proofs compare times: nothing may run beside them.
TIMED = "collectives"


def directory_of(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: directory_of(item) not in LONGEST)
    for item in items:
        if directory_of(item) == TIMED and item.get_closest_marker("prove"):
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def google_server() -> Iterator[FaultyS3]:
    with faulty_google() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyS3]:
    if azurite() is None:
        pytest.skip("Azurite is not installed: npm install azurite")
    with faulty_azure(tmp_path_factory.mktemp("azurite")) as proxy:
        yield proxy


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are shortened, not removed."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def store(server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable S3 with the bucket ``bucket``."""
    quieten(server)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    s3.client_of.cache_clear()
    s3.client().create_bucket(Bucket="bucket")
    return quieten(server)


@pytest.fixture
def google(google_server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable Google Cloud Storage with the bucket ``bucket``."""
    from slipstream.storage import gcs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_server.url)
    gcs.client_of.cache_clear()
    return quieten(google_server)


@pytest.fixture
def azure(azure_server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable Azure Blob Storage with the container ``bucket``."""
    quieten(azure_server)
    from slipstream.storage import azure

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(azure_server.url))
    azure.client_of.cache_clear()
    with contextlib.suppress(FileExistsError):
        azure.client("").mkdir("bucket")
    return quieten(azure_server)


@pytest.fixture(params=list(REMOTE))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """A prefix of each store in turn."""
    fixture, write = REMOTE[request.param]
    return Remote(f"{request.param}://bucket/{tmp_path.name}/base", request.getfixturevalue(fixture), write)


def quieten(server: FaultyS3) -> FaultyS3:
    """Forget faults that an earlier test left, and what it asked."""
    server.plan.clear()
    server.fired.clear()
    server.requests.clear()
    return server
