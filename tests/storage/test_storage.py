"""All stores keep the same promises."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import UserError
from slipstream.storage import (
    AlreadyThere,
    MissingObject,
    Storage,
    StorageUnavailable,
    azure,
    copy_within_s3,
    gcs,
    list_objects,
    open_listed,
    open_reader,
    read_range,
    retry,
    s3,
    storage_for,
)
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import ACCOUNT_KEY, REMOTE, Remote, connection_string

#: Enough for several parts, each with its own content, the last one short.
LARGE = random.Random(1).randbytes(2 * s3.PART_BYTES + 12345)


@pytest.fixture
def forgotten() -> Callable[[], None]:
    """Forget the clients, which have read their settings."""

    def forget() -> None:
        for module in (s3, gcs, azure):
            module.client_of.cache_clear()

    return forget


@pytest.fixture(params=["local", *REMOTE])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return storage_for(str(tmp_path / "base"))
    request.getfixturevalue(REMOTE[request.param][0])
    return storage_for(f"{request.param}://bucket/{tmp_path.name}/base")


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
    storage.create("marker", b"first")
    with pytest.raises(AlreadyThere):
        storage.create("marker", b"second")
    assert storage.get("marker", tmp_path / "down").read_bytes() == b"first"


def create_when_told(base: str, barrier: Any, outcomes: Any) -> None:
    """In a process of its own, on a disk without hard links."""

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    os.link = no_link  # type: ignore[assignment]
    mine = f"{os.getpid()}".encode() * 100_000
    for number in range(20):
        barrier.wait()
        try:
            storage_for(base).create(f"places/{number}", mine)
            outcomes.put((number, hashlib.sha256(mine).hexdigest()))
        except AlreadyThere:
            outcomes.put((number, ""))


def test_of_several_writers_one_wins_on_a_disk_without_hard_links(tmp_path: Path) -> None:
    """And nobody sees its file half-written."""
    context = multiprocessing.get_context("fork")
    barrier, outcomes = context.Barrier(3), context.Queue()
    racers = [context.Process(target=create_when_told, args=(str(tmp_path), barrier, outcomes)) for _ in range(3)]
    for racer in racers:
        racer.start()
    seen: set[int] = set()
    while any(racer.is_alive() for racer in racers) and len(seen) < 20:
        for path in tmp_path.glob("places/*"):
            assert path.stat().st_size and len(set(path.read_bytes())) > 1
            assert path.stat().st_size % 100_000 == 0
            seen.add(int(path.name))
    found = [outcomes.get(timeout=60) for _ in range(60)]
    for racer in racers:
        racer.join(60)
    for number in range(20):
        (winner,) = [digest for place, digest in found if place == number and digest]
        assert hashlib.sha256((tmp_path / "places" / str(number)).read_bytes()).hexdigest() == winner


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_with_neither_hard_links_nor_locks_is_said(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("filelock.FileLock._acquire", refuse)
    with pytest.raises(UserError, match=r"has neither hard links nor locks.* choose a directory on another disk"):
        storage_for(str(tmp_path)).create("marker", b"first")
    assert storage_for(str(tmp_path)).list() == []
    assert [path.name for path in (tmp_path / ".scratch").iterdir() if path.name != "create.lock"] == []


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
    with pytest.raises(UserError, match=r"hdfs://.* expected a path, file://, s3://, gs:// or abfs://"):
        storage_for("hdfs://bucket/key")


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


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
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
    with pytest.raises(StorageUnavailable, match=f"kept answering 409 {code} in 12 attempts"):
        storage.create("second", b"mine")


def test_an_upload_goes_on_after_a_lost_answer(google: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"gs://bucket/{tmp_path.name}")
    google.inject("POST", "pass", "lost", "reset", "lost")
    google.inject("PUT", "503")
    put_file(storage, "large", LARGE)
    assert storage.get("large", tmp_path).read_bytes() == LARGE
    # The session, three parts of which one was sent twice, and a question after each fault, of which one was repeated.
    assert [sum(line.startswith(method) for line in google.requests) for method in ("POST", "PUT")] == [5, 4]


@pytest.mark.parametrize("way", ["put", "create"])
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


@pytest.mark.parametrize("data", [b"x" * 1000, LARGE], ids=["small", "large"])
def test_bytes_that_change_every_time_are_noticed(remote: Remote, data: bytes) -> None:
    if data == LARGE and remote.base.startswith("gs://"):
        remote.proxy.inject("POST", "pass")  # the session, whose body is JSON
    remote.proxy.inject(remote.write, *["corrupt"] * 3 * retry.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match=r"BadDigest|CRC32C|Md5Mismatch"):
        put_file(remote.storage, "key", data)


def test_a_store_without_checksums_that_lost_bytes_is_noticed_by_the_size(store: FaultyS3, tmp_path: Path) -> None:
    store.inject("PUT", "cut")
    with pytest.raises(StorageUnavailable, match="holds 500 bytes, 1000 were sent"):
        storage_for(f"s3://bucket/{tmp_path.name}").put("small", b"x" * 1000)
    assert store.fired == [("PUT", "cut")]


def test_a_download_that_changes_on_the_way_is_noticed(remote: Remote, tmp_path: Path) -> None:
    storage, proxy = remote.storage, remote.proxy
    storage.put("small", b"x" * 1000)
    # Google tells the checksum of the whole, before.
    proxy.inject("GET", *["pass"] * remote.base.startswith("gs://"), *["corrupt"] * retry.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match="other bytes"):
        storage.get("small", tmp_path)
    assert ("GET", "corrupt") in proxy.fired and not list(tmp_path.glob("small*"))


def test_a_store_that_stays_away_is_told_from_one_that_refuses(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    storage, proxy = remote.storage, remote.proxy
    proxy.inject(remote.write, *["503"] * retry.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match=r"kept answering 503.* in 12 attempts"):
        storage.put("key", b"data")
    assert len(proxy.fired) == retry.ATTEMPTS
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string("http://127.0.0.1:9"))
    forgotten()
    with pytest.raises(StorageUnavailable, match="did not answer in 12 attempts") as away:
        storage.put("key", b"data")
    assert "\n" not in str(away.value)


def test_what_is_replaced_or_gone_while_it_is_read_is_one_line(remote: Remote) -> None:
    storage = remote.storage
    storage.put("table.csv", b"a,b\n" * 9)
    (listed,) = list_objects(f"{remote.base}/table.csv")
    assert read_range(listed, 4, 8) == b"a,b\n"
    storage.put("table.csv", b"b,a\n" * 9)
    for read in (lambda: open_listed(listed).read(), lambda: read_range(listed, 0, 4)):
        with pytest.raises(UserError, match=rf"{remote.base}/table\.csv: was replaced while it was read"):
            read()
    storage.delete(["table.csv"])
    with pytest.raises(UserError, match=rf"{remote.base}/table\.csv: (was replaced|no such object)"):
        open_listed(listed).read()


def test_a_denied_request_and_a_missing_bucket_are_one_line(remote: Remote) -> None:
    remote.proxy.inject(remote.write, "403")
    with pytest.raises(UserError, match=r"access denied.*; the identity in use needs") as denied:
        remote.storage.put("key", b"data")
    nowhere = remote.base.replace("bucket", "nowhere")
    for ask in (lambda: storage_for(nowhere).put("key", b"data"), lambda: list_objects(nowhere)):
        with pytest.raises(UserError, match=r"there is no (bucket|container) 'nowhere'") as missing:
            ask()
        assert "\n" not in str(missing.value)
    assert "\n" not in str(denied.value) and len(remote.proxy.fired) == 1


def test_many_objects_are_listed_by_pages_and_deleted(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = remote.storage
    for module in (gcs, azure):
        monkeypatch.setattr(module, "PAGE", 5)
    keys = [f"{number:02d}/ä b?#%.bin" for number in range(12)]
    for key in keys:
        storage.put(key, key.encode())
    asked = len(remote.proxy.requests)
    assert storage.list() == keys
    assert len(remote.proxy.requests) - asked == (1 if remote.base.startswith("s3://") else 3)
    assert [info.uri for info in list_objects(remote.base)] == [f"{remote.base}/{key}" for key in keys]
    storage.delete(keys)
    assert storage.list() == []


def test_keys_that_are_not_deleted_are_counted_with_the_reason(store: FaultyS3, tmp_path: Path) -> None:
    """S3 answers 200 to such a request, and says in the answer what it did not do."""
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    for key in ("a/kept", "a/other", "b/kept"):
        storage.put(key, b"bytes")
    store.inject("POST", "kept kept AccessDenied")
    with pytest.raises(UserError, match=r"2 of 3 files were not deleted \(AccessDenied\).* needs s3:Delete") as error:
        storage.delete(storage.list())
    assert storage.list() == ["a/kept", "b/kept"] and "\n" not in error.value.message
    store.inject("POST", "kept kept SlowDown", "kept b/ InternalError")
    storage.delete(storage.list())
    assert storage.list() == [] and len(store.fired) == 3
    storage.put("a/kept", b"bytes")
    store.inject("POST", *["kept kept SlowDown"] * retry.ATTEMPTS)
    with pytest.raises(StorageUnavailable, match=r"1 of 1 files were not deleted.* kept answering SlowDown in 12"):
        storage.delete(["a/kept"])


def test_more_keys_than_one_request_takes_are_deleted(store: FaultyS3, tmp_path: Path) -> None:
    storage = storage_for(f"s3://bucket/{tmp_path.name}")
    keys = [f"{number:04d}" for number in range(2001)]
    for key in (keys[0], keys[1000], keys[2000]):
        storage.put(key, b"bytes")
    store.requests.clear()
    store.inject("POST", "kept 0000 AccessDenied")
    with pytest.raises(UserError, match=r"1 of 2001 files were not deleted"):
        storage.delete(keys)
    assert storage.list() == [keys[0]]
    assert sum(line.startswith("POST") for line in store.requests) == 3


@pytest.mark.parametrize("way", ["one request", "several", "a service without checksums"])
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
    with pytest.raises(UserError, match=r"/source: is not what was written: its copy .*; make it anew"):
        copy_within_s3(f"{base}/source", f"{base}/copy", *written)
    put_file(storage_for(base), "source", LARGE[:-1])
    with pytest.raises(UserError, match=rf"has {len(LARGE) - 1} bytes .* expected {len(LARGE)} with"):
        copy_within_s3(f"{base}/source", f"{base}/copy", *written)


def test_a_forked_process_makes_connections_of_its_own(remote: Remote) -> None:
    remote.storage.put("parent", b"data")
    child = multiprocessing.get_context("fork").Process(target=put_as_a_child, args=(remote.base,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and remote.storage.list() == ["child", "parent"]


def put_as_a_child(base: str) -> None:
    storage_for(base).put("child", b"data")


@pytest.mark.parametrize(
    ("uri", "package", "line"),
    [
        ("gs://bucket/key", "gcsfs.core", r"gs://bucket/key: gcsfs is missing .*extra \[gcs\]"),
        ("abfs://bucket/key", "adlfs", r"abfs://bucket/key: adlfs is missing .*extra \[azure\]"),
    ],
)
def test_a_missing_package_names_the_extra(uri: str, package: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("slipstream.storage.gcs", "slipstream.storage.azure"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=line):
        list_objects(uri)


def test_pauses_are_long_enough_for_half_a_minute_and_leave_the_global_generator_alone() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    assert 30 < sum(retry.pause(attempt) for attempt in range(1, retry.ATTEMPTS)) < 50
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


def test_no_credentials_is_one_line(
    monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None], tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_", "FLYTE_AZURE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    forgotten()
    with pytest.raises(UserError, match=r"no usable credentials .* set GOOGLE_APPLICATION_CREDENTIALS") as google:
        list_objects("gs://bucket/x")
    with pytest.raises(
        UserError, match=r"no usable account or credentials .* set AZURE_STORAGE_ACCOUNT_NAME"
    ) as microsoft:
        list_objects("abfs://bucket/x")
    assert "\n" not in f"{google.value}{microsoft.value}"


def test_the_account_stands_in_the_address_or_in_flytes_variables(
    monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AZURE_STORAGE_ACCOUNT_NAME", "flytes")
    monkeypatch.setenv("FLYTE_AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    forgotten()
    for name, account in {"bucket": "flytes", "bucket@mine.dfs.core.windows.net": "mine"}.items():
        blob = azure.AzureContainer(name)._blob("a/key")
        assert blob.url == f"https://{account}.blob.core.windows.net/bucket/a/key"
    forgotten()


def test_the_variables_that_flyte_gives_its_pods_suffice(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", store.url)
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "minio")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "secret")
    s3.client_of.cache_clear()
    storage_for("s3://bucket/flyte").put("key", b"data")
    assert any(line.startswith("PUT /bucket/flyte/key") for line in store.requests)
