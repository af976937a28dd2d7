"""Raw data in S3 is read by ranges, with failing requests, and gives the same result as local files."""

from pathlib import Path

import pytest

from slipstream.pipeline.prepare.base_set import BaseSet
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from slipstream.shared.storage import StorageUnavailable, retry, s3, storage_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.tables import table_text
from tests.support.wording import refuses


def upload(path: Path, key: str) -> None:
    s3.client().put_object(Bucket="bucket", Key=key, Body=path.read_bytes())


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        pytest.param("*.csv", 100, marks=pytest.mark.prove),
        pytest.param("*/*.csv", 400, marks=pytest.mark.prove),
        ("**/*.csv", 500),
        pytest.param("day=2024-01-0[12]", 200, marks=pytest.mark.prove),
        pytest.param("day=*/part-?.csv", 400, marks=pytest.mark.prove),
        pytest.param("d*/*", 400, marks=pytest.mark.prove),
        pytest.param("", 500, marks=pytest.mark.prove),
    ],
)
def test_patterns_name_the_same_files_in_s3_as_locally(
    store: FaultyS3, tmp_path: Path, pattern: str, rows: int
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


@pytest.mark.prove
def test_rows_of_an_earlier_set_are_copied_within_s3(store: FaultyS3, tmp_path: Path) -> None:
    """Several pods copy them; where they are fetched they have to be what they were."""
    directory = tmp_path / "in"
    directory.mkdir()
    (directory / "0.csv").write_text(table_text(400, seed=0))
    source = {"source": fingerprint_source(list_source(str(directory)), "y")}
    earlier = prepare(tmp_path / "earlier", str(directory), "y", DataConfig(), source)
    (directory / "1.csv").write_text(table_text(400, seed=1))
    for path in earlier.directory.iterdir():
        upload(path, f"earlier/{path.name}")
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
