"""Raw data in S3 is read by ranges, with failing requests, and gives the same result as local files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.errors import UserError
from slipstream.prepare.base_set import BaseSet
from slipstream.prepare.engine import prepare
from slipstream.source.config import DataConfig
from slipstream.source.files import list_source
from slipstream.source.fingerprint import fingerprint_source
from slipstream.storage import StorageUnavailable, retry, s3, storage_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.tables import table_text
from tests.support.wording import refuses


def upload(path: Path, key: str) -> None:
    s3.client().put_object(Bucket="bucket", Key=key, Body=path.read_bytes())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_in_s3_give_the_same_rows_as_local_ones(
    store: FaultyS3,
    tmp_path: Path,
    suffix: str,
) -> None:
    directory = tmp_path / "in"
    directory.mkdir()
    for part in range(2):
        path = directory / f"{part}.{suffix}"
        path.write_text(table_text(400, seed=part))
        if suffix == "parquet":
            draw = np.random.default_rng(part)
            pq.write_table(pa.table({"number": draw.normal(size=400), "y": draw.integers(0, 2, 400)}), path)
        upload(path, f"{suffix}/{path.name}")
    upload(directory / f"0.{suffix}", f"{suffix}/_SUCCESS")
    remote = prepare(tmp_path / "a", f"s3://bucket/{suffix}", "y", DataConfig(), {})
    local = prepare(tmp_path / "b", str(directory), "y", DataConfig(), {})
    for split in SPLITS:
        name = f"{split}-00000.rows"
        assert remote.files[name].sha256 == local.files[name].sha256
    assert PreparedData.open(tmp_path / "a").card["rows"]["read"] == 800


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        pytest.param("*.csv", 100, marks=pytest.mark.prove),
        pytest.param("*/*.csv", 400, marks=pytest.mark.prove),
        ("**/*.csv", 500),
        ("day=2024-01-0[12]", 200),
        pytest.param("day=*/part-?.csv", 400, marks=pytest.mark.prove),
        pytest.param("d*/*", 400, marks=pytest.mark.prove),
        ("", 500),
    ],
)
def test_patterns_name_the_same_files_in_s3_as_locally(
    store: FaultyS3,
    tmp_path: Path,
    pattern: str,
    rows: int,
) -> None:
    directory = tmp_path / "in"
    for day in range(1, 5):
        folder = directory / f"day=2024-01-0{day}"
        folder.mkdir(parents=True)
        (folder / "part-0.csv").write_text(table_text(100, seed=day))
        (folder / "_SUCCESS").touch()
    (directory / "all.csv").write_text(table_text(100))
    for path in sorted(directory.rglob("*.*")) + sorted(directory.rglob("_SUCCESS")):
        upload(path, f"hive/{path.relative_to(directory).as_posix()}")
    remote = prepare(tmp_path / "a", f"s3://bucket/hive/{pattern}", "y", DataConfig(), {})
    local = prepare(tmp_path / "b", f"{directory}/{pattern}", "y", DataConfig(), {})
    assert PreparedData.open(tmp_path / "a").card["rows"]["read"] == rows
    assert remote.files["train-00000.rows"].sha256 == local.files["train-00000.rows"].sha256
    kind = {column["name"]: column["type"] for column in remote.read_json("card.json")["columns"]}.get("day")
    assert kind == (None if pattern == "*.csv" else "time")


def test_a_pattern_that_nothing_matches_is_said(store: FaultyS3, tmp_path: Path) -> None:
    upload(Path(__file__), "code/test.py")
    with refuses(UserError):
        prepare(tmp_path / "p", "s3://bucket/code/*.csv", "y", DataConfig(), {})
    with refuses(UserError):
        prepare(tmp_path / "p2", "s3://*/code/x.csv", "y", DataConfig(), {})


def test_a_store_that_denies_is_said_in_one_line(store: FaultyS3, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(table_text(50))
    upload(path, "denied/t.csv")
    store.inject("GET", "403")
    with refuses(UserError):
        prepare(tmp_path / "p", "s3://bucket/denied/t.csv", "y", DataConfig(), {})
    assert not list((tmp_path / "p").glob("*"))


def test_a_store_that_stays_away_is_no_mistake_of_the_user(store: FaultyS3, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(table_text(50))
    upload(path, "away/t.csv")
    store.inject("GET", *["reset"] * retry.ATTEMPTS)
    with refuses(StorageUnavailable):
        prepare(tmp_path / "p", "s3://bucket/away/t.csv", "y", DataConfig(), {})
    assert not list((tmp_path / "p").glob("*"))


def test_the_fingerprint_follows_the_etag(store: FaultyS3, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(table_text(50))
    upload(path, "finger/t.csv")
    first = fingerprint_source(list_source("s3://bucket/finger"), "y")
    assert fingerprint_source(list_source("s3://bucket/finger"), "y") == first
    path.write_text(table_text(50, seed=1))
    upload(path, "finger/t.csv")
    assert fingerprint_source(list_source("s3://bucket/finger"), "y") != first


@pytest.mark.parametrize("address", ["s3://bucket/nothing", "s3://no-such-bucket/t.csv"])
def test_nothing_there_is_said_in_one_line(store: FaultyS3, tmp_path: Path, address: str) -> None:
    with pytest.raises(UserError, match=address.split("/")[2]):
        prepare(tmp_path / "p", address, "y", DataConfig(), {})


def test_an_earlier_set_in_s3_is_taken_up_as_a_local_one(store: FaultyS3, tmp_path: Path) -> None:
    directory = tmp_path / "in"
    directory.mkdir()
    (directory / "0.csv").write_text(table_text(400, seed=0))
    source = {"source": fingerprint_source(list_source(str(directory)), "y")}
    earlier = prepare(tmp_path / "earlier", str(directory), "y", DataConfig(), source)
    (directory / "1.csv").write_text(table_text(400, seed=1))
    for path in earlier.directory.iterdir():
        upload(path, f"earlier/{path.name}")
    store.inject("GET", "500", "truncate", "reset")
    sets = [
        prepare(tmp_path / name, str(directory), "y", DataConfig(earlier=address), {})
        for name, address in {"local": str(earlier.directory), "remote": "s3://bucket/earlier"}.items()
    ]
    assert len(store.fired) == 3
    local, remote = ({name: record.sha256 for name, record in each.files.items()} for each in sets)
    rows = [f"{split}-{segment:05d}.rows" for split in SPLITS for segment in range(2)]
    assert {name: remote[name] for name in rows} == {name: local[name] for name in rows}
    assert sets[1].check_sha256().files["train-00000.rows"] == earlier.files["train-00000.rows"]

    # Several pods copy the rows within the store; where they are fetched they have to be what they were.
    opened, writer = BaseSet.open("s3://bucket/earlier"), ArtifactWriter(tmp_path / "pods")
    assert opened.copy_rows(writer, home="s3://bucket/home") == 1 and not list((tmp_path / "pods").iterdir())
    for name in opened.segments:
        assert (
            storage_for("s3://bucket/home").get(name, tmp_path / "copy").read_bytes() == earlier.path(name).read_bytes()
        )
    raw = bytearray(earlier.path("train-00000.rows").read_bytes())
    raw[99] ^= 1
    (tmp_path / "damaged").write_bytes(raw)
    upload(tmp_path / "damaged", "earlier/train-00000.rows")
    with refuses(UserError, match=r"earlier/train-00000\.rows:"):
        opened.copy_rows(writer, home="s3://bucket/home")
    with refuses(UserError, match=r"data\.earlier:"):
        prepare(tmp_path / "p", str(directory), "y", DataConfig(earlier="s3://bucket/earlier"), {})
