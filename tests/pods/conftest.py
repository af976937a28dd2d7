"""Fixtures of the tests that run pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.training_pods import Cluster, training_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with training_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
