"""Processes of a test: what the fork server loads, running processes and their children."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.operations.proofs.processes import FORK


def preload() -> None:
    """Have the server load what the ranks of tests need. The last list counts for the whole process."""
    FORK.set_forkserver_preload(
        [
            "torch",
            "torch._dynamo",
            "slipstream.pipeline.train.run",
            "slipstream.pipeline.collectives.launch.measurements",
            "slipstream.operations.proofs.gpu.attempts",
            "tests.support.package",
            "tests.support.job_pods",
        ]
    )


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
