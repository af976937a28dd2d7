"""Fixtures of the tests that run pods."""

import hashlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from slipstream.operations.proofs.rehearsal.rehearsal import Rehearsal
from slipstream.shared.storage.s3 import client_of
from tests.support import REPOSITORY
from tests.support.training_pods import Cluster, training_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with training_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def here(place: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """The cluster ``place`` of a file of tests, whose S3 this process sees, too."""
    client_of.cache_clear()  # another test had another server
    for name, value in place.bucket.environment.items():
        monkeypatch.setenv(name, value)
    yield place
    client_of.cache_clear()


# Tests of the simulator itself, which `make prove` runs while neither it nor flytekit has changed

SIMULATOR_TESTS = [
    f"tests/pods/test_cluster_{name}.py" for name in ("attempts", "operator", "queues", "rounds", "scheduler")
]
#: Digest of the simulator that last passed them.
PROVED = Path(__file__).with_name("simulator_proved.txt")


def simulator_digest() -> str:
    """Digest of the simulator's code and tests, and of flytekit's release."""
    places = ("slipstream/operations/proofs/rehearsal", "slipstream/flyte/before_start.py", *SIMULATOR_TESTS)
    files = [path for place in places for path in source_files(REPOSITORY / place)]
    parts = [path.read_bytes() for path in files] + [version("flytekit").encode()]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def source_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of an unchanged simulator as long ones; ``STORE=1`` records that this one has passed them."""
    paths = {REPOSITORY / name for name in SIMULATOR_TESTS}
    tests = [item for item in items if item.path in paths]
    if tests and PROVED.read_text().strip() == simulator_digest():
        for item in tests:
            item.add_marker(pytest.mark.prove)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    whole = exitstatus == 0 and not hasattr(session.config, "workerinput")  # a worker does not see the others' failures
    if os.environ.get("STORE") and whole and set(session.config.args) >= set(SIMULATOR_TESTS):
        PROVED.write_text(simulator_digest() + "\n")
