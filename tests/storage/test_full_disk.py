"""Full disks and quotas are recognised by the error of any write, and named with their place."""

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from safetensors import SafetensorError

from slipstream.flyte.failures import FailureReport
from slipstream.flyte.stage import mapped_errors
from slipstream.shared.errors import UserError
from slipstream.shared.storage import local, out_of_space, storage_for
from slipstream.shared.storage.object_store import write_at
from tests.support.wording import refuses

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
ERRORS: list[Exception] = [
    FULL,
    QUOTA,
    # Of a copied tree, which has no number.
    shutil.Error([("a", "b", str(FULL))]),
    # Of Rust, by which weights are written.
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    # Of a worker process, whose error another one raises.
    RuntimeError(f"rank 1: OSError: {FULL}"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_task_names_the_place_that_is_full(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write does not say which: it is that with the least space of those where tasks write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "disk_of", hash)  # each has a disk of its own
    monkeypatch.setattr(local, "free_bytes", lambda place: 0 if place.name == ".slipstream" else 1 << 30)
    with refuses(UserError, match=rf"^{tmp_path}/\.slipstream:"), mapped_errors():
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), RuntimeError("a bug"), UserError("told")]
)
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    assert not out_of_space(error)
    with pytest.raises(type(error)) as raised, mapped_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("way", ["put", "create"])
@pytest.mark.parametrize("error", [FULL, QUOTA], ids=["full", "quota"])
def test_nothing_half_written_is_left(
    way: str, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_for(str(tmp_path / "base"))
    storage.put("key", b"before")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(error))
        with refuses(UserError):
            getattr(storage, way)("other", b"bytes")
    assert [path.name for path in (tmp_path / "base").rglob("*") if path.is_file()] == ["key"]
    getattr(storage, way)("other", b"bytes")
    assert storage.list() == ["key", "other"]


def test_a_worker_without_room_for_its_report_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, content: bytes) -> int:
        path.touch()
        raise FULL

    monkeypatch.setattr(Path, "write_bytes", half)
    FailureReport.of(RuntimeError("the disk is full")).leave(str(tmp_path / "train"))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_disk_takes_in_parts_is_written_whole_or_raises(tmp_path: Path) -> None:
    """As a disk does that fills up: of Azure's files nothing else would tell."""
    right, taken = os.pwrite, list[int]()

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        taken.append(len(data))
        if len(taken) == 4:
            raise FULL
        return right(descriptor, data[:3], offset)

    with (tmp_path / "file").open("wb") as file, mock.patch.object(os, "pwrite", pwrite):
        write_at(file.fileno(), b"01234567", 2)
        assert taken == [8, 5, 2]
        with pytest.raises(OSError, match="No space left"):
            write_at(file.fileno(), b"more", 10)
    assert (tmp_path / "file").read_bytes() == b"\0\x0001234567"
