"""Processes of the proofs: a fork server with torch loaded, free ports, pyflyte in the clone."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from slipstream.shared.errors import UserError

#: Starts a process in a tenth of a second; it has torch and the training engine.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torch._dynamo", "slipstream.pipeline.train.run"])


def free_port() -> int:
    """Return a TCP port of the loopback interface on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def clone() -> Path:
    """Return the directory of the clone whose ``workflows`` this process would import."""
    found = find_spec("workflows")
    assert found and found.origin, "the command line offers this in a clone only"
    return Path(found.origin).resolve().parents[1]


def run_pyflyte(words: Sequence[str], command: str, variables: Mapping[str, str]) -> str:
    """Run pyflyte in the clone and return its output.

    Errors name ``command``, the subcommand in ``words``. Raises ``UserError`` with the last line of the output.
    """
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("pyflyte")), *words],
        cwd=clone(),
        env={**os.environ, "COLUMNS": "1000", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    if ended.returncode:
        boxed = [line.strip("│ ") for line in ended.stdout.splitlines() if line.startswith("│")]
        last = boxed or [line for line in ended.stdout.splitlines() if line.strip()]
        raise UserError(f"pyflyte {command}: {last[-1] if last else f'exit code {ended.returncode}'}")
    return ended.stdout
