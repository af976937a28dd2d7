"""Processes of a test: a fork server with torch loaded, free ports, running processes and their children."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# It sets a list of its own: loaded first.
import slipstream.collectives.launch.worker  # noqa: F401

#: Starts a process in a tenth of a second; it has torch, the training engine and flytekit's commands, but no workflow.
FORK = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Have the server load what the ranks of tests need. The last list that is set counts, for the whole process."""
    FORK.set_forkserver_preload(
        [
            "torch",
            "torch._dynamo",
            "slipstream.train.run",
            "slipstream.collectives.launch.measurements",
            "tests.support.training_runs",
            "tests.support.package",
            "tests.support.job_pods",
        ]
    )


preload()


def torchrun(
    prepared: Path, output: Path, config: Mapping[str, Any], restarts: int, world: int = 2
) -> subprocess.Popen[bytes]:
    """Start ``slipstream train`` under torch's agent, with a ``log`` next to the output."""
    output.parent.mkdir(parents=True, exist_ok=True)
    settings = output.parent / "config.yaml"
    settings.write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", "slipstream", "train"]
    with (output.parent / "log").open("ab") as log:
        return subprocess.Popen(
            [*command, str(prepared), str(output), str(settings)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def running(pid: int) -> bool:
    try:
        # In some containers, no process reaps orphans, and they stay zombies.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def forked_workers(agent: int) -> list[int]:
    """The ranks of an agent of ours: they are forked from its fork server."""
    return [worker for server in workers_of(agent, b"forkserver") for worker in workers_of(server, b"forkserver")]


def workers_of(agent: int, marked: bytes = b"slipstream\0train") -> list[int]:
    """The ranks of torchrun: its children whose command line is so ``marked`` (it also has a resource tracker)."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
            if int(fields[1]) == agent and marked in command:
                found.append(int(status.parent.name))
    return sorted(found)


def largest_of_session(leader: int) -> int:
    """The process with the most memory among those that ``leader`` started, and these, but for itself."""
    sizes = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and int(status.parent.name) != leader:
                sizes[int(status.parent.name)] = int(fields[21])
    return max(sizes, key=sizes.__getitem__)
