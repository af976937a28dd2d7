"""Stores that answer badly, corrupt bytes or are unavailable."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.storage import (
    AlreadyThere,
    StorageUnavailable,
    copy_within_s3,
    list_objects,
    open_listed,
    open_reader,
    read_range,
    retry,
    s3,
    storage_for,
)
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import REMOTE, Remote, connection_string
from tests.support.large_objects import LARGE, put_file
from tests.support.proving import first_few
from tests.support.wording import refuses


def test_transfers_survive_faults(remote: Remote, tmp_path: Path) -> None:
    storage, proxy = remote.storage, remote.proxy
    proxy.inject(remote.write, "500", "503", "reset", "503")
    put_file(storage, "large", LARGE)
    proxy.inject("GET", "truncate", "reset", "500", "truncate")
    assert storage.get("large", tmp_path).read_bytes() == LARGE
    proxy.inject("GET", "truncate", "503", "reset")
    with open_reader(f"{storage.base}/large") as reader:
        assert reader.read() == LARGE
    assert not proxy.plan
    assert len(proxy.fired) == 11


def test_a_lost_answer_does_not_make_us_lose_our_own_race(remote: Remote) -> None:
    remote.proxy.inject(remote.write, "lost")
    remote.storage.create("marker", b"mine alone")
    assert remote.proxy.fired == [(remote.write, "lost")]
    assert sum(line.startswith(remote.write) for line in remote.proxy.requests) == 2


@pytest.mark.parametrize(
    "code", ["ConditionalRequestConflict", pytest.param("OperationAborted", marks=pytest.mark.prove)]
)
def test_a_write_that_races_with_another_is_tried_again(store: FaultyS3, tmp_path: Path, code: str) -> None:
    """409 says nothing about who wins: 412 does, in answer to a later attempt."""
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    store.inject("PUT", f"409 {code}", f"409 {code}")
    storage.create("first", b"mine")
    store.inject("PUT", f"409 {code}")
    with pytest.raises(AlreadyThere):
        storage.create("first", b"another's")
    assert len(store.fired) == 3 and storage.get("first", tmp_path).read_bytes() == b"mine"
    store.inject("PUT", *[f"409 {code}"] * retry.ATTEMPTS)
    with refuses(StorageUnavailable):
        storage.create("second", b"mine")


def test_an_upload_goes_on_after_a_lost_answer(google: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"gs://bucket/{tmp_path.name}")
    google.inject("POST", "pass", "lost", "reset", "lost")
    google.inject("PUT", "503")
    put_file(storage, "large", LARGE)
    assert storage.get("large", tmp_path).read_bytes() == LARGE
    # POST: the session, three parts and a repeated part. PUT: a question after every fault, one of them repeated.
    assert [sum(line.startswith(method) for line in google.requests) for method in ("POST", "PUT")] == [5, 4]


@pytest.mark.parametrize("way", first_few(["put", "create"]))
def test_bytes_that_change_on_the_way_are_sent_again(remote: Remote, tmp_path: Path, way: str) -> None:
    storage, proxy = remote.storage, remote.proxy
    proxy.inject(remote.write, "corrupt", "corrupt")
    getattr(storage, way)("small", b"x" * 1000)
    assert proxy.fired == [(remote.write, "corrupt")] * 2
    assert storage.get("small", tmp_path).read_bytes() == b"x" * 1000


@pytest.mark.parametrize("kind", ["s3", "abfs"])
def test_a_part_that_changes_on_the_way_is_sent_again(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    proxy = request.getfixturevalue(REMOTE[kind][0])
    storage = storage_for(f"{kind}://bucket/{tmp_path.name}")
    proxy.inject("PUT", "corrupt")
    put_file(storage, "large", LARGE)
    assert storage.get("large", tmp_path / "down").read_bytes() == LARGE and len(proxy.fired) == 1


@pytest.mark.parametrize("data", first_few([b"x" * 1000, LARGE], names=["small", "large"]))
def test_bytes_that_change_every_time_are_noticed(remote: Remote, data: bytes) -> None:
    if data == LARGE and remote.base.startswith("gs://"):
        remote.proxy.inject("POST", "pass")  # the session, whose body is JSON
    remote.proxy.inject(remote.write, *["corrupt"] * 3 * retry.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match=r"BadDigest|CRC32C|Md5Mismatch"):
        put_file(remote.storage, "key", data)


def test_a_store_without_checksums_that_lost_bytes_is_noticed_by_the_size(store: FaultyS3, tmp_path: Path) -> None:
    store.inject("PUT", "cut")
    with refuses(StorageUnavailable):
        storage_for(f"s3://bucket/{tmp_path.name}").put("small", b"x" * 1000)
    assert store.fired == [("PUT", "cut")]


def test_a_download_that_changes_on_the_way_is_noticed(remote: Remote, tmp_path: Path) -> None:
    storage, proxy = remote.storage, remote.proxy
    storage.put("small", b"x" * 1000)
    # Google tells the checksum of the whole, before.
    proxy.inject("GET", *["pass"] * remote.base.startswith("gs://"), *["corrupt"] * retry.ATTEMPTS)
    with refuses(StorageUnavailable):
        storage.get("small", tmp_path)
    assert ("GET", "corrupt") in proxy.fired and not list(tmp_path.glob("small*"))


def test_a_store_that_stays_away_is_told_from_one_that_refuses(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    storage, proxy = remote.storage, remote.proxy
    proxy.inject(remote.write, *["503"] * retry.ATTEMPTS)
    with refuses(StorageUnavailable):
        storage.put("key", b"data")
    assert len(proxy.fired) == retry.ATTEMPTS
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string("http://127.0.0.1:9"))
    forgotten()
    with refuses(StorageUnavailable) as away:
        storage.put("key", b"data")
    assert "\n" not in str(away.value)


def test_what_is_replaced_or_gone_while_it_is_read_is_one_line(remote: Remote) -> None:
    storage = remote.storage
    storage.put("table.csv", b"a,b\n" * 9)
    (listed,) = list_objects(f"{remote.base}/table.csv")
    assert read_range(listed, 4, 8) == b"a,b\n"
    storage.put("table.csv", b"b,a\n" * 9)
    for read in (lambda: open_listed(listed).read(), lambda: read_range(listed, 0, 4)):
        with refuses(UserError, match=rf"{remote.base}/table\.csv:"):
            read()
    storage.delete(["table.csv"])
    with refuses(UserError, match=rf"{remote.base}/table\.csv:"):
        open_listed(listed).read()


def test_a_denied_request_and_a_missing_bucket_are_one_line(remote: Remote) -> None:
    remote.proxy.inject(remote.write, "403")
    with refuses(UserError) as denied:
        remote.storage.put("key", b"data")
    nowhere = remote.base.replace("bucket", "nowhere")
    for ask in (lambda: storage_for(nowhere).put("key", b"data"), lambda: list_objects(nowhere)):
        with refuses(UserError) as missing:
            ask()
        assert "\n" not in str(missing.value)
    assert "\n" not in str(denied.value) and len(remote.proxy.fired) == 1


def test_keys_that_are_not_deleted_are_counted_with_the_reason(store: FaultyS3, tmp_path: Path) -> None:
    """S3 answers 200 to such a request, and says in the answer what it did not do."""
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    for key in ("a/kept", "a/other", "b/kept"):
        storage.put(key, b"bytes")
    store.inject("POST", "kept kept AccessDenied")
    with refuses(UserError) as error:
        storage.delete(storage.list())
    assert storage.list() == ["a/kept", "b/kept"] and "\n" not in error.value.message
    store.inject("POST", "kept kept SlowDown", "kept b/ InternalError")
    storage.delete(storage.list())
    assert storage.list() == [] and len(store.fired) == 3
    storage.put("a/kept", b"bytes")
    store.inject("POST", *["kept kept SlowDown"] * retry.ATTEMPTS)
    with refuses(StorageUnavailable):
        storage.delete(["a/kept"])


def test_more_keys_than_one_request_takes_are_deleted(store: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    keys = [f"{number:04d}" for number in range(2001)]
    for key in (keys[0], keys[1000], keys[2000]):
        storage.put(key, b"bytes")
    store.requests.clear()
    store.inject("POST", "kept 0000 AccessDenied")
    with refuses(UserError):
        storage.delete(keys)
    assert storage.list() == [keys[0]]
    assert sum(line.startswith("POST") for line in store.requests) == 3


@pytest.mark.prove
@pytest.mark.parametrize("way", first_few(["several", "one request", "a service without checksums"]))
def test_what_is_copied_within_s3_is_verified(
    way: str, store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"s3://bucket/{tmp_path.name}"
    if way == "several":
        monkeypatch.setattr(s3, "COPY_BYTES", 8 << 20)
        monkeypatch.setattr(s3, "PART_COPY_BYTES", 8 << 20)
    if way == "a service without checksums":
        s3.client().meta.events.register(
            "after-call.s3.CopyObject", lambda parsed, **_: parsed["CopyObjectResult"].pop("ChecksumSHA256")
        )
    put_file(storage_for(base), "source", LARGE)
    written = len(LARGE), hashlib.sha256(LARGE).hexdigest()
    store.requests.clear()
    copy_within_s3(f"{base}/source", f"{base}/copy", *written)
    assert any(line.startswith("GET") for line in store.requests) == (way != "one request")
    assert storage_for(base).get("copy", tmp_path).read_bytes() == LARGE
    put_file(storage_for(base), "source", bytes([LARGE[0] ^ 1]) + LARGE[1:])
    with refuses(UserError, match="/source:"):
        copy_within_s3(f"{base}/source", f"{base}/copy", *written)
    put_file(storage_for(base), "source", LARGE[:-1])
    with pytest.raises(UserError, match=rf"has {len(LARGE) - 1} bytes .* expected {len(LARGE)} with"):
        copy_within_s3(f"{base}/source", f"{base}/copy", *written)


def test_pauses_are_long_enough_for_half_a_minute_and_leave_the_global_generator_alone() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    assert 30 < sum(retry.retry_pause(attempt) for attempt in range(1, retry.ATTEMPTS)) < 50
    assert random.random() == expected
