"""Deletion of unneeded checkpoints; if it is forbidden or late, no training ends and none uses wrong data."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName, complete_checkpoints
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.storage import storage_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.small_run import Run, names
from tests.support.wording import refuses, same_wording

FIRST, RETRY = Holder("f1", 0, "s3://b/raw/aa/f1-n0-0"), Holder("f1", 1, "s3://b/raw/zz/f1-n0-1")


@pytest.fixture
def address(store: FaultyS3, tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}/home"


@pytest.mark.prove
def test_expired_checkpoints_that_may_not_be_deleted_are_a_warning_now_and_then(
    address: str, store: FaultyS3, capsys: pytest.CaptureFixture[str]
) -> None:
    run, storage = Run(address), storage_for(address)
    store.inject("POST", *["kept /step- AccessDenied"] * 6)
    for step in range(1, 9):
        run.steps(1)
        run.save(step)
    assert not store.plan
    assert [name.step for name in complete_checkpoints(storage.list())] == list(range(8, 0, -1))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "training continues" in line]
    # Of one to six that stay: whenever they have more than doubled.
    assert [line.partition("; ")[0].partition("home: ")[2] for line in warnings] == [
        "1 expired checkpoint could not be deleted",
        "3 expired checkpoints could not be deleted",
    ]
    assert all("1 of 1 files were not deleted (AccessDenied)" in line for line in warnings)
    assert all("needs s3:DeleteObject on bucket 'bucket'" in line for line in warnings)
    run.save(9)
    assert [name.step for name in complete_checkpoints(storage.list())] == [9, 8]
    assert {CheckpointName.parse(key.partition("/")[0]) for key in storage.list("step-")} == {
        CheckpointName(1, 9),
        CheckpointName(1, 8),
    }
    run.checkpoints.end()


def test_what_an_attempt_has_left_behind_and_may_not_be_deleted_is_a_warning(
    address: str, store: FaultyS3, capsys: pytest.CaptureFixture[str]
) -> None:
    home = CheckpointDirectory(storage_for(address))
    old = home.claim(FIRST)
    for key in (
        f"{CheckpointName(old, 1)}/tensors-00000.bin",
        f"{CheckpointName(old, 1)}/manifest.json",
        f"{CheckpointName(old, 2)}/state.json",
    ):
        home.storage.put(key, b"{}")
    store.inject("POST", "kept /step- AccessDenied")
    assert home.inherit(home.claim(RETRY)) == [CheckpointName(old, 1)]
    same_wording(capsys.readouterr().err)
    store.inject("POST", "kept /step- AccessDenied")
    home.finish(RETRY, "model", "code")
    same_wording(capsys.readouterr().err)
    assert home.finished() is not None and not store.plan
    # A fresh start next to the old checkpoints would resume from them.
    store.inject("POST", "kept /step- AccessDenied")
    with refuses(UserError):
        home.reopen()
    assert home.finished() is not None


def test_a_manifest_that_arrives_after_its_files_were_deleted_is_no_checkpoint(tmp_path: Path) -> None:
    """A request for it was sent twice, and the second one came when a successor had retired the checkpoint. Taken for
    one it would be in the place of a whole one among those that are retained."""
    first = Run(tmp_path)
    for step in (1, 2):
        first.steps(1)
        first.save(step)
    first.checkpoints.end()
    late = (tmp_path / str(CheckpointName(1, 2)) / "manifest.json").read_bytes()
    second = Run(tmp_path)
    assert [name.step for name in second.checkpoints.home.checkpoints()] == [2, 1]
    for step in (3, 4):
        second.steps(1)
        second.save(step)
    second.checkpoints.end()
    assert names(tmp_path) == [str(CheckpointName(2, 3)), str(CheckpointName(2, 4))]
    second.checkpoints.home.storage.put(f"{CheckpointName(1, 2)}/manifest.json", late)
    assert second.checkpoints.home.checkpoints() == [CheckpointName(2, 4), CheckpointName(2, 3)]
    third = Run(tmp_path)
    restored = third.checkpoints.restore()
    assert restored is not None and (restored.step, restored.refused) == (4, ())
    assert names(tmp_path) == [str(CheckpointName(2, 3)), str(CheckpointName(2, 4))]
    third.checkpoints.end()


def test_files_on_their_way_to_a_store_lie_where_nobody_else_can_put_a_link(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the directory for temporary files, which is everybody's."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    run = Run(address)
    (mine,) = shared.iterdir()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("of others")
    prefix = mine.name.rpartition("-")[0].removesuffix("0001")
    for attempt in ("0001", "0002", "0003"):
        (shared / f"{prefix}{attempt}").symlink_to(elsewhere)
    run.steps(1)
    run.save(1)
    run.checkpoints.end()
    # The second attempt removes what the first one left, which was killed, and follows no link.
    second = Run(address)
    second.steps(1)
    second.save(2)
    assert not mine.exists() and [path.name for path in elsewhere.iterdir()] == ["file"]
    second.checkpoints.close()
    assert all(path.is_symlink() for path in shared.iterdir())
    second.checkpoints.end()


def test_a_rank_without_room_for_its_directory_fails_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.steps(1)
    make = Path.mkdir

    def full(path: Path, *arguments: object, **named: object) -> None:
        if path.name == str(CheckpointName(1, 1)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", full)
    run.checkpoints.save(1, {"step": 1})
    run.checkpoints.save(2, {"step": 2})
    assert run.checkpoints.finish() == CheckpointName(1, 2)
    assert "checkpoint could not be saved: " in (said := capsys.readouterr().err) and "no space left" in said
    run.checkpoints.end()
