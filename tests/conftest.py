"""Fixtures for all tests."""

import contextlib
import gc
import os
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

import pytest

from slipstream.operations.doctor.archive import RegistrationArchive, read_package
from slipstream.shared.storage import retry, s3
from tests.support import processes, wording
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3
from tests.support.faulty_stores import REMOTE, Remote, azurite, connection_string, faulty_azure, faulty_google
from tests.support.once import shared_place

processes.preload()

#: The directories whose files take minutes. They come first, so that in the end no process waits long for another.
LONGEST = ("command_line", "registration", "pods", "train", "collectives", "export", "promote")
#: Variables that tell a process its place in a process group.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def directory_of(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wording.note(items, config)
    items.sort(key=lambda item: directory_of(item) not in LONGEST)


def pytest_collection_finish() -> None:
    """Exclude millions of collected objects from garbage collections, which took a seventh of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with wording.compared(item.path, item.nodeid.partition("::")[2]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield
    wording.end()


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """Raise an AssertionError if a test leaves other variables of a process group than it found."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    left = [name for name in RANK_VARIABLES if os.environ.get(name) != before[name]]
    for name in left:
        os.environ.pop(name, None)
    assert not left, f"variables of the environment that the test did not restore: {', '.join(left)}"


@pytest.fixture(scope="session")
def archive_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``archive_for("local")`` is what is packaged for a profile, once for all processes of the tests."""
    from tests.support.package import packaged

    return partial(packaged, shared_place(tmp_path_factory))


@pytest.fixture(scope="session")
def package_for(archive_for: Callable[[str], Path]) -> Callable[[str], RegistrationArchive]:
    """``package_for("local")`` is what would be registered for a profile."""
    return lambda profile: read_package(archive_for(profile))


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
def store(server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A reachable S3 with the bucket ``bucket``."""
    quieten(server)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    s3.client_of.cache_clear()
    s3.client().create_bucket(Bucket="bucket")
    yield quieten(server)
    quieten(server)


@pytest.fixture
def google(google_server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A reachable Google Cloud Storage with the bucket ``bucket``."""
    from slipstream.shared.storage import gcs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_server.url)
    gcs.client_of.cache_clear()
    yield quieten(google_server)
    quieten(google_server)


@pytest.fixture
def azure(azure_server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A reachable Azure Blob Storage with the container ``bucket``."""
    quieten(azure_server)
    from slipstream.shared.storage import azure

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(azure_server.url))
    azure.client_of.cache_clear()
    with contextlib.suppress(FileExistsError):
        azure.client("").mkdir("bucket")
    yield quieten(azure_server)
    quieten(azure_server)


@pytest.fixture(params=list(REMOTE))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """A prefix of each store in turn."""
    fixture, write = REMOTE[request.param]
    return Remote(f"{request.param}://bucket/{tmp_path.name}/base", request.getfixturevalue(fixture), write)


def quieten(server: FaultyS3) -> FaultyS3:
    """Forget the faults that a test injected, and its requests."""
    server.plan.clear()
    server.fired.clear()
    server.requests.clear()
    server.silent_until = server.down_until = 0.0
    server.ignores_conditions, server.clock_ahead_s = False, 0.0
    return server
