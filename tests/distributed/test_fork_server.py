"""Forked processes have the environment, directory and output of spawned ones, and end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.shared.distributed import fork_server
from tests.support.forked import collect_garbage, told
from tests.support.processes import running

#: Of a script.
PIPES: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}


def say(capfd: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    child = fork_server.start_process(told, arguments)
    child.join(60)
    assert child.exitcode == 0
    return capfd.readouterr().out.split()


def server_pid() -> int:
    from multiprocessing import forkserver

    pid: Any = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


def test_a_process_has_the_environment_the_directory_and_the_output_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fork_server.start_fork_server(["torch"])
    first = server_pid()
    assert say(capfd, "a") == ["a", "-", "-", "-", "1", str(Path.cwd())]
    monkeypatch.setenv("MARK", "set later")
    monkeypatch.chdir(tmp_path)
    fork_server.start_fork_server(["torch"])
    assert say(capfd, "b") == ["b", "set", "later", "-", "-", "1", str(tmp_path)]
    monkeypatch.delenv("MARK")
    assert say(capfd, "c")[1] == "-"
    assert server_pid() == first
    # torch reads this one while it is loaded.
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    fork_server.start_fork_server(["torch"])
    assert say(capfd, "d")[-2] == "2" and server_pid() != first and not running(first)


def ranked(variables: dict[str, str], function: fork_server.ForkedCall) -> None:
    os.environ |= variables
    function("e")


@pytest.mark.prove
def test_variables_that_are_set_in_it_count_more_than_those_of_its_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch elastic tells each worker its rank so; in a pod of a job the agent has a RANK of its own."""
    monkeypatch.setenv("RANK", "7")
    fork_server.start_fork_server(["torch"])
    child = fork_server.CONTEXT.Process(target=ranked, args=({"RANK": "3"}, fork_server.ForkedCall(told)))
    child.start()
    child.join(60)
    assert capfd.readouterr().out.split()[2] == "3"


ORPHANS = """
import os, sys, time
from slipstream.shared.distributed import fork_server
from slipstream.shared.distributed.child_processes import end_with_parent
from tests.support.forked import wait_for_long
if __name__ == "__main__":
    fork_server.start_fork_server([])
    child = fork_server.start_process(wait_for_long, ())
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_what_was_forked_ends_when_its_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    worker = int(starter.stdout.readline())
    time.sleep(0.5)  # until it said that it ends with its parent
    assert running(worker)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    deadline = time.monotonic() + 20
    while running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.prove
def test_modules_of_the_working_directory_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong one')\n")
    code = """
import sys; sys.path[:] = [entry for entry in sys.path if entry]
from slipstream.shared.distributed import fork_server
from tests.support.forked import collect_garbage, told
fork_server.start_fork_server(["torch"])
child = fork_server.start_process(told, ("f",))
child.join()
sys.exit(child.exitcode)
"""
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.startswith("f "), said.stderr


@pytest.mark.prove
def test_a_collection_of_garbage_copies_nothing_that_the_server_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    fork_server.start_fork_server(["torch"])
    child = fork_server.start_process(collect_garbage, ())
    child.join(60)
    frozen, before, after = map(int, capfd.readouterr().out.split())
    assert frozen > 100_000 and after - before < 10_000


def test_a_long_temporary_directory_is_no_traceback(tmp_path: Path) -> None:
    """Of a job's own, or below a home: the path of a socket has 107 bytes."""
    long = tmp_path / ("a" * 60) / ("b" * 60)
    long.mkdir(parents=True)
    script = (
        "from multiprocessing import forkserver; from slipstream.shared.distributed import fork_server\n"
        "fork_server.start_fork_server([]); child = fork_server.start_process(print, ('forked',)); child.join(60)\n"
        "print(forkserver._forkserver._forkserver_address)"
    )
    ran = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(long)}, **PIPES)
    assert ran.returncode == 0, ran.stderr
    forked, address = ran.stdout.split()
    assert forked == "forked" and not Path(address).parent.exists()
