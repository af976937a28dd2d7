"""Inputs of a task that another task made, and that were deleted from the store since."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.artifact_types import MadeByElement
from slipstream.flyte.stage import map_errors
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.shared.errors import UserError
from slipstream.shared.stages import StageRun
from slipstream.shared.storage.s3 import client_of
from tests.support.faulty_s3 import FaultyS3

RUN = StageRun("prepare", 1.0, False)
#: Addresses as :func:`output_address` makes them, and an address that a user gave.
MADE, OTHER = (f"raw/kt/f1-n0-0/{digit * 32}/tasks.prepare.prepare" for digit in "ab")
GIVEN = "ours/tasks.prepare.prepare"


@pytest.fixture
def bucket(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Bucket]:
    made = S3Bucket(server.url, f"deleted-outputs-{uuid.uuid4().hex}")
    client_of.cache_clear()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    client_of.cache_clear()


def directory(uri: str) -> FlyteDirectory:
    return FlyteDirectory(uri, remote_directory=False)


def error_with(inputs: dict[str, Any], message: str) -> str:
    """What a task says that raises an error with these inputs."""

    @map_errors
    def work(**inputs: Any) -> None:
        raise UserError(message)

    with pytest.raises(UserError) as raised:
        work(**inputs)
    return str(raised.value)


@pytest.mark.parametrize("missing", ["", "/manifest.json"])
def test_the_output_and_its_task_are_named(missing: str, bucket: S3Bucket) -> None:
    """Deleted as a whole, or a file of it."""
    uri = bucket.uri(MADE)
    bucket.write(f"{OTHER}/manifest.json", b"{}")
    if missing:
        bucket.write(f"{MADE}/rows", b"1")
    for inputs in (
        {"prepared": directory(uri)},
        {"others": [directory(bucket.uri(OTHER)), directory(uri)]},
        {"networks": [None, MadeByElement(directory(uri), RUN)]},
        {"address": f"{uri}/"},
    ):
        line = error_with(inputs, f"{uri}{missing}: no such object; check bucket 'b' and the key")
        assert line.startswith(f"{uri}: this cached output of the task tasks.prepare.prepare was deleted from the ")
        assert line.endswith("start again with --overwrite-cache, which makes it again")


def test_other_errors_stay(bucket: S3Bucket) -> None:
    for key in (MADE, OTHER):
        bucket.write(f"{key}/manifest.json", b"{}")
    for inputs, message in (
        ({"prepared": directory(bucket.uri(MADE))}, f"{bucket.uri(MADE)}/manifest.json: not a manifest of this format"),
        ({"prepared": directory(bucket.uri(MADE)), "target": "y"}, "target: there is no column 'y'"),
        ({"prepared": directory(bucket.uri(GIVEN))}, f"{bucket.uri(GIVEN)}/manifest.json: no such object"),
        ({"prepared": directory("s3://no-such-bucket/" + MADE)}, "s3://no-such-bucket: there is no bucket"),
    ):
        assert error_with(inputs, message) == message
