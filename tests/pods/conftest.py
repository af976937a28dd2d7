"""Fixtures of the tests that run pods."""

from collections.abc import Iterator

import pytest

from slipstream.operations.proofs.rehearsal.rehearsal import Rehearsal
from slipstream.shared.storage.s3 import client_of
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
