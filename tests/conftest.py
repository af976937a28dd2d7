"""Fixtures for the tests of any room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasks.storage import s3
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3


@pytest.fixture(scope="session")
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as proxy:
        yield proxy


@pytest.fixture
def store(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable S3 with the bucket ``bucket``; pauses between attempts are shortened, not removed."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setattr(s3, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(s3, "LONGEST_PAUSE_S", 0.05)
    s3.client_of.cache_clear()
    s3.client().create_bucket(Bucket="bucket")
    server.plan.clear()
    server.fired.clear()
    server.requests.clear()
    return server
