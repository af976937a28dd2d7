"""Removal of workspaces by their owners, and by others once the owner has ended."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from slipstream.shared.artifacts import workspaces
from slipstream.shared.artifacts.workspaces import LOCK, put_in_place, temporary_workspace
from slipstream.shared.errors import UserError
from tests.support.wording import refuses

#: Holds a workspace until its input ends. Its number is that of no process here, as in a container of its own.
OWNER = """
import os, sys
from pathlib import Path
os.getpid = lambda: 2**22 + 1
from slipstream.shared.artifacts.workspaces import temporary_workspace
with temporary_workspace(Path(sys.argv[1])) as directory:
    (directory / "unfinished").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


@contextmanager
def owner(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the workspace that it holds."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())


def test_what_a_living_process_of_another_namespace_holds_stays_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, held):
        with temporary_workspace(tmp_path):
            assert (held / "unfinished").exists()
        process.kill()
        process.wait()
        assert held.exists()
        with temporary_workspace(tmp_path) as ours:
            assert not held.exists() and ours.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_owner_removes_its_own_and_a_process_that_it_forks_does_not_give_it_up(tmp_path: Path) -> None:
    with temporary_workspace(tmp_path) as held:
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        with temporary_workspace(tmp_path):
            assert held.exists()
        held.rename(tmp_path / "published")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_where_there_are_no_locks_nothing_of_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner(tmp_path) as (process, left):
        process.kill()

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(FileLock, "acquire", refuse)
        with temporary_workspace(tmp_path) as ours:
            assert ours.exists() and left.exists()
            patched.undo()  # as another machine sees the same disk
            with temporary_workspace(tmp_path):
                assert ours.exists() and not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_of_another_system_whose_locks_may_be_unseen_here_only_what_is_old_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owner(tmp_path) as (process, left):
        process.kill()
    lock = left.with_suffix(LOCK)
    lock.write_text("another boot")
    with temporary_workspace(tmp_path):
        assert left.exists()
    now = time.time
    with monkeypatch.context() as patched:  # a clock that is ahead is not that of the disk
        patched.setattr(time, "time", lambda: now() + workspaces.FORSAKEN_S + 1)
        with temporary_workspace(tmp_path):
            assert left.exists()
    old = time.time() - workspaces.FORSAKEN_S - 1
    os.utime(lock, (old, old))
    with temporary_workspace(tmp_path):
        assert not left.exists() and not lock.exists()


def test_a_file_that_was_not_locked_yet_is_taken_from_nobody(tmp_path: Path) -> None:
    """The moment between the creation of the file and its lock: there is nothing to remove yet but the file."""
    (tmp_path / f".{'0f' * 8}{LOCK}").touch()
    (tmp_path / f".others{LOCK}").touch()
    with temporary_workspace(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [f".others{LOCK}"]


def test_many_that_begin_and_sweep_at_once_never_lose_one(tmp_path: Path) -> None:
    many = """
import sys
from pathlib import Path
from slipstream.shared.artifacts.workspaces import temporary_workspace
for _ in range(60):
    with temporary_workspace(Path(sys.argv[1])) as directory:
        (directory / "file").touch()
        assert (directory / "file").exists()
        (directory / "file").rename(directory / "renamed")
"""
    run = [sys.executable, "-c", many, str(tmp_path)]
    processes = [subprocess.Popen(run, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=60)[1] for process in processes] == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_of_two_that_make_one_directory_the_second_neither_nests_nor_mixes(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    put_in_place(tmp_path / "first", target)
    with refuses(UserError):
        put_in_place(tmp_path / "second", target)
    assert [path.name for path in target.iterdir()] == ["first"]
