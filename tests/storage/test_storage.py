"""The contract of all stores: objects, ranges, listings, and one winner of several writers."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.storage import (
    AlreadyThere,
    MissingObject,
    Storage,
    azure,
    gcs,
    list_objects,
    open_reader,
    s3,
    storage_for,
    store_time,
)
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import Remote
from tests.support.large_objects import LARGE, put_file
from tests.support.wording import refuses


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

    mine = f"{os.getpid()}".encode() * 100_000
    with mock.patch.object(os, "link", no_link):
        for number in range(20):
            barrier.wait()
            try:
                storage_for(base).create(f"places/{number}", mine)
                outcomes.put((number, hashlib.sha256(mine).hexdigest()))
            except AlreadyThere:
                outcomes.put((number, ""))


def test_of_several_writers_one_wins_on_a_disk_without_hard_links(tmp_path: Path) -> None:
    """No reader sees a partial file."""
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
    monkeypatch.setattr(fcntl, "flock", refuse)
    with refuses(UserError):
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
    with refuses(UserError):
        storage_for("hdfs://bucket/key")


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


def test_a_forked_process_makes_connections_of_its_own(remote: Remote) -> None:
    remote.storage.put("parent", b"data")
    child = multiprocessing.get_context("fork").Process(target=put_as_a_child, args=(remote.base,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and remote.storage.list() == ["child", "parent"]


def put_as_a_child(base: str) -> None:
    storage_for(base).put("child", b"data")


def test_a_file_is_synced_before_it_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, synced, right = storage_for(str(tmp_path / "base")), list[str](), os.fsync

    def fsync(descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if file.is_relative_to(tmp_path):  # not what a thread of an earlier test writes
            synced.append(file.name)
        right(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    source = tmp_path / "source"
    source.write_bytes(b"bytes")
    storage.put("directory/key", source)
    assert synced == ["source", "directory"]


def test_a_directory_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, scan = storage_for(str(tmp_path)), os.scandir
    storage.put("steps/one", b"bytes")

    def fail_below(path: str) -> Any:
        if str(path).endswith("steps"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", fail_below)
    for listing in (storage.list, lambda: list_objects(str(tmp_path))):
        with refuses(UserError):
            listing()
    assert storage.list("absent/") == []


def test_a_listing_leaves_out_what_is_written_and_what_is_gone(tmp_path: Path) -> None:
    storage = storage_for(str(tmp_path))
    for key in ("a", "b/c"):
        storage.put(key, b"bytes")
    (storage.scratch() / "step-000000000001.a0001").mkdir()
    (storage.scratch() / "step-000000000001.a0001" / "tensors").touch()
    (tmp_path / "gone").symlink_to("absent")
    assert [info.uri for info in list_objects(str(tmp_path))] == [str(tmp_path / "a"), str(tmp_path / "b/c")]


def test_the_time_is_by_the_clock_of_the_store(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    monkeypatch.setattr(remote.proxy, "clock_ahead_s", -2e6)
    assert abs(store_time(f"{remote.base}/") - (now - 1e6)) < 60
    empty = "s3://bucket" if remote.base.startswith("s3://") else remote.base
    assert store_time(empty) == pytest.approx(now - 1e6, abs=60)


def test_the_time_of_a_directory_is_by_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    assert abs(store_time(str(tmp_path)) - now) < 60 and not list(tmp_path.iterdir())
    assert store_time(str(tmp_path / "absent")) == now + 1e6, "nothing can be deleted there either"


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 01 Jan 99999 00:00:00 GMT"])
def test_a_store_without_a_date_is_one_line(date: str, store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "date", lambda uri: date)
    with refuses(UserError):
        store_time("s3://bucket/x")
