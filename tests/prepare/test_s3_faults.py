"""An S3 that stalls, denies or loses raw data during reading: retried if possible, else one line of error."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from slipstream.config import RunConfig
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.storage import StorageUnavailable, retry, s3
from tasks.prepare import list_data
from tests.support.faulty_s3 import FaultyS3
from tests.support.proving import diagonal, first_few
from tests.support.tables import table_text
from tests.support.wording import refuses

FORMATS = ("csv", "parquet")


@pytest.fixture
def away(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Store with short timeouts in its client."""
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(retry, "ATTEMPTS", 4)
    s3.client_of.cache_clear()
    yield store
    store.plan.clear()
    s3.client_of.cache_clear()


def put(path: Path) -> str:
    """Its address in S3, for a table of this format."""
    if path.suffix == ".csv":
        path.write_text(table_text(2000))
    elif path.suffix == ".npz":
        draw = np.random.default_rng(0)
        np.savez(path, images=draw.integers(0, 256, (300, 8, 8), np.uint8), y=np.arange(300) % 3)
    else:
        draw = np.random.default_rng(0)
        pq.write_table(pa.table({"number": draw.normal(size=2000), "y": draw.integers(0, 2, 2000)}), path)
    s3.client().put_object(Bucket="bucket", Key=f"faults/{path.name}", Body=path.read_bytes())
    return f"s3://bucket/faults/{path.name}"


def requests_of(store: FaultyS3, address: str, tmp_path: Path) -> list[str]:
    """What an undisturbed prepare asks of the store."""
    store.requests.clear()
    prepare(tmp_path / "undisturbed", address, "y", DataConfig(), {})
    return [line for line in store.requests if line.startswith("GET")]


@pytest.mark.prove
@pytest.mark.parametrize("format", first_few(FORMATS))
def test_bodies_that_stall_are_asked_for_again(away: FaultyS3, tmp_path: Path, format: str) -> None:
    address = put(tmp_path / f"t.{format}")
    requests = requests_of(away, address, tmp_path)
    first = next(position for position, line in enumerate(requests) if "list-type" not in line)
    away.inject("GET", *["pass"] * first, "stall", "stall")
    output = prepare(tmp_path / "made", address, "y", DataConfig(), {})
    assert away.fired[-2:] == [("GET", "stall")] * 2 and not away.plan
    local = prepare(tmp_path / "local", str(tmp_path / f"t.{format}"), "y", DataConfig(), {})
    assert output.files["train-00000.rows"] == local.files["train-00000.rows"]


@pytest.mark.parametrize(
    ("format", "position"),
    [
        ("csv", "first"),
        pytest.param("parquet", "first", marks=pytest.mark.prove),
        pytest.param("parquet", "last", marks=pytest.mark.prove),
        pytest.param("npz", "last", marks=pytest.mark.prove),
    ],
)
def test_a_store_that_stalls_for_ever_is_said(away: FaultyS3, tmp_path: Path, format: str, position: str) -> None:
    address = put(tmp_path / f"t.{format}")
    requests = requests_of(away, address, tmp_path)
    reads = [index for index, line in enumerate(requests) if "list-type" not in line]
    away.inject("GET", *["pass"] * reads[0 if position == "first" else -1], *["stall"] * 4)
    with refuses(StorageUnavailable, match=rf"t\.{format}:"):
        prepare(tmp_path / "made", address, "y", DataConfig(), {})
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(("position", "format"), diagonal(["first", "last"], FORMATS))
def test_what_is_denied_in_the_midst_is_not_called_damaged(
    store: FaultyS3, tmp_path: Path, format: str, position: str
) -> None:
    address = put(tmp_path / f"t.{format}")
    requests = requests_of(store, address, tmp_path)
    reads = [index for index, line in enumerate(requests) if "list-type" not in line]
    store.inject("GET", *["pass"] * reads[0 if position == "first" else -1], "403")
    with refuses(UserError, match=f"^{address}:"):
        prepare(tmp_path / "made", address, "y", DataConfig(), {})
    assert not (tmp_path / "made" / MANIFEST).exists()


@pytest.mark.parametrize("format", first_few(FORMATS, 1))
def test_what_is_gone_after_it_was_listed_is_named(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    from slipstream.shared.source import files

    address = put(tmp_path / f"t.{format}")
    listed = files.stored_files(address)
    monkeypatch.setattr(files, "stored_files", lambda data: listed)
    s3.client().delete_object(Bucket="bucket", Key=f"faults/t.{format}")
    with refuses(UserError, match=f"^{address}:"):
        prepare(tmp_path / "made", address, "y", DataConfig(), {})


def test_flyte_tries_again_and_a_person_is_told(away: FaultyS3, tmp_path: Path) -> None:
    address = put(tmp_path / "t.csv")
    away.inject("GET", *["503"] * 4)
    with refuses(FlyteRecoverableException):
        list_data.task_function(data=address, target="y", config=RunConfig())
    away.inject("GET", *["503"] * 4)
    with refuses(UserError):
        list_data(data=address, target="y", config=RunConfig())
