"""Runs commands as a user would, in a working directory of their own.

Most of a short ``pyflyte run`` is the start of an interpreter and the imports of flytekit and torch. So a command runs
in the process of the tests, shut off from it, and only what needs a process of its own gets one.
"""

import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from slipstream.shared.profiles import profile
from slipstream.shared.storage import conditional, s3
from tests.support import REPOSITORY
from tests.support.captured import Captured

PYFLYTE = Path(sys.executable).with_name("pyflyte")
WORKFLOWS = REPOSITORY / "workflows"
TRAINING = WORKFLOWS / "training.py"
#: A wide terminal keeps each message on one line inside its box.
TERMINAL = {"COLUMNS": "1000"}

#: The exit code of a command, and all that it and its processes wrote as one text.
Ended = subprocess.CompletedProcess[str]
Run = Callable[..., Ended]


def run_in(
    directory: Path, *arguments: str, workflow: str = "train_and_export", file: str = "training", **environment: str
) -> Ended:
    """``pyflyte run`` of the main job, or of another workflow of its or another file, in ``directory`` and in this
    process.

    The shape of the process groups is fixed when the workflow is imported: a profile needs :func:`start_in`.
    """
    if profile.CHOICE in environment:
        raise ValueError("a workflow that is imported already keeps its profile; use start_in")
    return invoke(pyflyte, directory, ["run", str(WORKFLOWS / f"{file}.py"), workflow, *arguments], environment)


def start_in(directory: Path, *arguments: str, workflow: str = "train_and_export", **environment: str) -> Ended:
    """:func:`run_in` as a process of its own, to its end."""
    return run_process([PYFLYTE, "run", TRAINING, workflow, *arguments], directory, environment)


def run_process(command: list[Any], directory: Path, environment: dict[str, str]) -> Ended:
    return subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env={**os.environ, **TERMINAL, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )


def invoke(command: click.Command, directory: Path, arguments: list[str], environment: dict[str, str]) -> Ended:
    """Run a click command in this process as if it were one of its own; its worker processes are real ones.

    click's ``CliRunner`` does not see what workers and native code write, so the descriptors are captured instead.
    """
    code = 0
    with process_state(directory, environment), Captured() as captured:
        try:
            command.main(args=arguments, prog_name=command.name)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    return Ended([command.name or "", *arguments], code, captured.text)


@contextmanager
def process_state(directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """Give a command the state of a fresh process in ``directory``, and take back what it changes in this one.

    That is: the working directory, the environment and what was remembered of it, the path and the user's modules, and
    the handlers of signals.
    """
    before, path, variables = Path.cwd(), list(sys.path), dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    forget(directory)
    os.chdir(directory)
    os.environ.update({**TERMINAL, **environment})
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)
        forget(directory)


def forget(directory: Path) -> None:
    """Forget what was read from the environment, and the modules that were imported from ``directory``."""
    profile.current_profile.cache_clear()
    s3.client_of.cache_clear()
    conditional.HONOURING.clear()
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{directory}{os.sep}"):
            del sys.modules[name]


def one_message(output: str) -> str:
    """The message, after asserting that besides flytekit's "Running Execution" line there is only its box."""
    assert "Traceback" not in output and 'File "' not in output, output
    lines = [line for line in output.splitlines() if line.strip()]
    usage = [line for line in lines if line.startswith(("Usage:", "Try ")) or "Try 'pyflyte" in line]
    boxed = [line for line in lines if line.lstrip()[:1] in "╭│╰"]
    progress = [line for line in lines if re.match(r"(Running Execution|prepare  |train  )", line)]
    rest = [line for line in lines if line not in usage + boxed + progress]
    assert not [line for line in rest if not line.startswith("Error")], output
    inside = [line for line in boxed if line.lstrip().startswith("│")] + rest
    assert len(inside) == 1, output
    return inside[0]
