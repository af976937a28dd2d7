"""Both stores keep the same promises."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.storage import (
    AlreadyThere,
    MissingObject,
    Storage,
    StorageUnavailable,
    list_objects,
    open_reader,
    s3,
    storage_for,
)
from tests.support.faulty_s3 import FaultyS3

#: Enough for several parts, each with its own content, the last one short.
LARGE = random.Random(1).randbytes(2 * s3.PART_BYTES + 12345)


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return storage_for(str(tmp_path / "base"))
    request.getfixturevalue("store")
    return storage_for(f"s3://bucket/{tmp_path.name}/base")


def put_file(storage: Storage, key: str, data: bytes) -> Path:
    source = storage.scratch() / f"{hashlib.sha256(storage.base.encode()).hexdigest()[:12]}-source"
    source.write_bytes(data)
    storage.put(key, source)
    return source


def test_put_takes_the_file_and_get_gives_its_bytes(storage: Storage, tmp_path: Path) -> None:
    source = put_file(storage, "a/large", LARGE)
    assert not source.exists()
    assert storage.get("a/large", tmp_path / "down").read_bytes() == LARGE


def test_list_is_sorted_and_keeps_to_the_prefix_and_delete_removes(storage: Storage) -> None:
    for key in ("b/2", "b/1", "bb/3", "a"):
        storage.put(key, key.encode())
    assert storage.list() == ["a", "b/1", "b/2", "bb/3"]
    assert storage.list("b/") == ["b/1", "b/2"]
    storage.delete(["b/1", "b/2", "never/there"])
    assert storage.list() == ["a", "bb/3"]


def test_of_several_fresh_writers_one_wins(storage: Storage, tmp_path: Path) -> None:
    storage.put("marker", b"first", fresh=True)
    with pytest.raises(AlreadyThere):
        storage.put("marker", b"second", fresh=True)
    assert storage.get("marker", tmp_path / "down").read_bytes() == b"first"


def test_a_missing_key_is_named(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(MissingObject, match="absent/key"):
        storage.get("absent/key", tmp_path)


def test_reader_reads_any_range(storage: Storage) -> None:
    put_file(storage, "large", LARGE)
    with open_reader(f"{storage.base}/large") as reader:
        assert reader.seek(0, 2) == len(LARGE)
        for start, length in ((0, 10), (s3.PART_BYTES - 5, 10), (len(LARGE) - 7, 100), (3, 9 << 20)):
            reader.seek(start)
            assert reader.read(length) == LARGE[start : start + length]


def test_objects_of_a_file_a_directory_and_a_prefix(storage: Storage) -> None:
    for key in ("data/part-1", "data/part-2", "data-old/part-9"):
        storage.put(key, key.encode())
    found = list_objects(f"{storage.base}/data")
    assert [(info.uri.removeprefix(storage.base), info.size) for info in found] == [
        ("/data/part-1", 11),
        ("/data/part-2", 11),
    ]
    assert [info.size for info in list_objects(f"{storage.base}/data-old/part-9")] == [15]
    before = found[0].etag
    storage.put("data/part-1", b"other bytes")
    assert list_objects(f"{storage.base}/data")[0].etag != before


def test_other_schemes_are_refused() -> None:
    with pytest.raises(UserError, match="gs://"):
        storage_for("gs://bucket/key")


def test_transfers_survive_faults(store: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", "500", "503", "reset", "503")
    put_file(storage, "large", LARGE)
    store.inject("GET", "truncate", "reset", "500", "truncate")
    assert storage.get("large", tmp_path).read_bytes() == LARGE
    store.inject("GET", "truncate", "503", "reset")
    with open_reader(f"{storage.base}/large") as reader:
        assert reader.read() == LARGE
    assert not store.plan
    assert len(store.fired) == 11


def test_a_lost_answer_does_not_make_us_lose_our_own_race(store: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", "lost")
    storage.put("marker", b"mine alone", fresh=True)
    assert store.fired == [("PUT", "lost")]
    assert sum(line.startswith("PUT") and "marker" in line for line in store.requests) == 2


@pytest.mark.parametrize("fresh", [False, True])
def test_bytes_that_change_on_the_way_are_sent_again(store: FaultyS3, tmp_path: Path, fresh: bool) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", "corrupt", "corrupt")
    storage.put("small", b"x" * 1000, fresh=fresh)
    assert store.fired == [("PUT", "corrupt")] * 2
    assert storage.get("small", tmp_path).read_bytes() == b"x" * 1000
    source = tmp_path / "large"
    source.write_bytes(LARGE)
    store.inject("PUT", "corrupt")
    storage.put("large", source)
    assert storage.get("large", tmp_path / "down").read_bytes() == LARGE and len(store.fired) == 3


def test_bytes_that_change_every_time_are_noticed(store: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", *["corrupt"] * s3.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match="BadDigest"):
        storage.put("small", b"x" * 1000)
    assert store.fired == [("PUT", "corrupt")] * s3.ATTEMPTS


def test_a_store_without_checksums_that_lost_bytes_is_noticed_by_the_size(store: FaultyS3, tmp_path: Path) -> None:
    store.inject("PUT", "cut")
    with pytest.raises(StorageUnavailable, match="holds 500 bytes, 1000 were sent"):
        storage_for(f"s3://bucket/{tmp_path.name}").put("small", b"x" * 1000)
    assert store.fired == [("PUT", "cut")]


def test_a_download_that_changes_on_the_way_is_noticed(store: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    storage.put("small", b"x" * 1000)
    store.inject("GET", "corrupt")
    with pytest.raises(StorageUnavailable, match="other bytes"):
        storage.get("small", tmp_path)
    assert store.fired == [("GET", "corrupt")] and not (tmp_path / "small").exists()


def test_a_store_that_stays_away_is_told_from_one_that_refuses(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", *["503"] * s3.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match="SlowDown"):
        storage.put("key", b"data")
    assert len(store.fired) == s3.ATTEMPTS
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3.client_of.cache_clear()
    with pytest.raises(StorageUnavailable, match="did not answer"):
        storage.put("key", b"data")


def test_pauses_are_long_enough_for_half_a_minute_and_leave_the_global_generator_alone() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    assert 30 < sum(s3.pause(attempt) for attempt in range(1, s3.ATTEMPTS)) < 50
    assert random.random() == expected


def test_what_the_user_has_to_mend_is_one_line(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no bucket 'nowhere'"):
        storage_for("s3://nowhere/x").put("key", b"data")
    with pytest.raises(UserError, match="no bucket 'nowhere'"):
        list_objects("s3://nowhere/x")
    with pytest.raises(MissingObject, match=r"s3://bucket/absent\.csv"):
        open_reader("s3://bucket/absent.csv")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/absent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/absent")
    s3.client_of.cache_clear()
    with pytest.raises(UserError, match="no usable credentials"):
        list_objects("s3://bucket/x")


def test_the_variables_that_flyte_gives_its_pods_suffice(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", store.url)
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "minio")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "secret")
    s3.client_of.cache_clear()
    storage_for("s3://bucket/flyte").put("key", b"data")
    assert any(line.startswith("PUT /bucket/flyte/key") for line in store.requests)
