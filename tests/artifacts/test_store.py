"""Local artifact store: keys follow the contents, and kills damage nothing."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact
from slipstream.shared.artifacts.workspaces import ArtifactStore, content_key
from tests.support.wording import same_wording


def fill(directory: Path, content: bytes = b"content") -> None:
    writer = ArtifactWriter(directory)
    writer.write_bytes("file", content)
    writer.finish("stage", {})


def test_an_entry_is_found_by_its_key_and_only_by_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.workspace("stage") as directory:
        fill(directory)
        store.publish(directory, "stage", "k1")
    found = store.find("stage", "k1")
    assert isinstance(found, Artifact) and found.read_bytes("file") == b"content"
    assert store.find("stage", "k2") is None
    assert [path.name for path in (tmp_path / "stage").iterdir()] == ["k1"]  # no workspace is left


def test_a_damaged_entry_is_reported_and_replaced(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.workspace("stage") as directory:
        fill(directory)
        store.publish(directory, "stage", "k")
    (tmp_path / "stage/k/file").write_bytes(b"cOntent")
    assert isinstance(store.find("stage", "k"), DamagedArtifact)
    with store.workspace("stage") as directory:
        fill(directory)
        store.publish(directory, "stage", "k")
    assert isinstance(store.find("stage", "k"), Artifact)
    shutil.rmtree(tmp_path / "stage/k")
    assert store.find("stage", "k") is None


def test_unfinished_work_is_never_published_and_leaves_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(DamagedArtifact), store.workspace("stage") as directory:
        (directory / "half").write_bytes(b"written")
        store.publish(directory, "stage", "k")
    assert list((tmp_path / "stage").iterdir()) == []


def test_of_two_processes_with_the_same_work_the_first_to_finish_wins(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.workspace("stage") as first, store.workspace("stage") as second:
        fill(first, b"first")
        fill(second, b"second")
        store.publish(first, "stage", "k")
        assert store.publish(second, "stage", "k").read_bytes("file") == b"first"


def test_one_at_a_time_makes_an_entry_and_who_waited_is_told(tmp_path: Path) -> None:
    store, entered = ArtifactStore(tmp_path), []

    def second() -> None:
        with store.turn("stage", "k") as waited:
            entered.append((waited, isinstance(store.find("stage", "k"), Artifact)))

    other = threading.Thread(target=second, daemon=True)
    with store.turn("stage", "k") as waited:
        assert not waited
        other.start()
        with store.turn("stage", "another key") as also_waited:
            assert not also_waited
        other.join(0.2)
        assert not entered
        (store.checkpoints("stage", "k") / "unfinished").touch()
        with store.workspace("stage") as directory:
            fill(directory)
            store.publish(directory, "stage", "k")
    other.join(20)
    assert entered == [(True, True)]
    assert [path.name for path in (tmp_path / "stage").iterdir()] == ["k"]


def test_turns_that_follow_each_other_closely_exclude_each_other(tmp_path: Path) -> None:
    """Each turn removes its empty directory and its lock file, just when the next one looks for them."""
    turns = """
import sys, time
from pathlib import Path
from slipstream.shared.artifacts.workspaces import ArtifactStore
root = Path(sys.argv[1])
for _ in range(40):
    with ArtifactStore(root).turn("stage", "k"):
        (root / "inside").touch(exist_ok=False)
        time.sleep(0.001)
        (root / "inside").unlink()
"""
    run = [sys.executable, "-c", turns, str(tmp_path)]
    processes = [subprocess.Popen(run, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = {line for process in processes for line in process.communicate(timeout=60)[1].splitlines()}
    assert said <= {"stage        another run is making this artifact; waiting for it"}
    assert list((tmp_path / "stage").iterdir()) == []


def test_unfinished_work_stays_for_the_next_turn(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.turn("stage", "k"):
        (store.checkpoints("stage", "k") / "unfinished").touch()
        raise KeyboardInterrupt
    with store.turn("stage", "k") as waited:
        assert not waited and (store.checkpoints("stage", "k") / "unfinished").exists()


def test_the_key_follows_every_part_and_not_the_order_of_the_inputs() -> None:
    key = content_key("train", "v1", {"a": 1, "b": {"c": 2}})
    assert key == content_key("train", "v1", {"b": {"c": 2}, "a": 1})
    others = [
        content_key("other", "v1", {"a": 1, "b": {"c": 2}}),
        content_key("train", "v2", {"a": 1, "b": {"c": 2}}),
        content_key("train", "v1", {"a": 1, "b": {"c": 3}}),
    ]
    assert len({key, *others}) == 4


def test_a_disk_without_locks_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with ArtifactStore(tmp_path).turn("train", "key") as waited:
        assert not waited
    same_wording(capsys.readouterr().err)
