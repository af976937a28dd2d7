"""Commands as processes of their own, with their measured time and memory."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support import REPOSITORY

#: What ends a process that hangs or takes memory without end.
MOST_CPU_S, MOST_BYTES = 40, 6 << 30


class Took(NamedTuple):
    """The exit code, all that was printed, seconds of CPU time and the most bytes that were held at once."""

    code: int
    output: str
    cpu_s: float
    peak: int


def slipstream(*arguments: object, directory: Path | None = None, **environment: str) -> Took:
    """Run ``slipstream`` with these arguments."""
    return took([sys.executable, "-m", "slipstream", *map(str, arguments)], directory, environment)


@cache
def help_of(*command: str) -> Took:
    """What the ``--help`` of a subcommand takes."""
    return slipstream(*command, "--help")


def took(command: Sequence[str], directory: Path | None, environment: dict[str, str]) -> Took:
    paths = {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "600"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=directory or REPOSITORY,
            env={**os.environ, **paths, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=bounded,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode()
    # On Linux in KiB.
    return Took(process.returncode, text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)


def bounded() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
