"""Runs ``pyflyte`` on a copy of the project, in a process that has flytekit and torch loaded and no task."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from slipstream.operations.proofs.processes import FORK
from tests.support import REPOSITORY

#: What a clone has that registration reads, or that decides what it uploads.
FILES = ("pyproject.toml", "constraints.txt", "README.md", ".dockerignore", ".gitignore", "flyte.config.yaml")
FOLDERS = ("slipstream", "tasks", "workflows", "images")

Ended = subprocess.CompletedProcess[str]


def clone(directory: Path) -> Path:
    """A copy of the project, which a test may change."""
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, directory)
    return directory


def run_pyflyte(project: Path, *arguments: str, **environment: str) -> Ended:
    """``pyflyte`` with these arguments in the directory of a clone: its exit code and all that it wrote."""
    log = project.with_name(f"{project.name}.log")
    variables = {**os.environ, "COLUMNS": "600", **environment}
    process = FORK.Process(target=in_process, args=(project, list(arguments), log, variables))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"pyflyte {arguments}: {log.read_text()}")
    return Ended(arguments, process.exitcode, log.read_text())


def in_process(project: Path, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(project)
    os.environ.clear()
    os.environ.update(environment)
    for name in list(sys.modules):
        if name.split(".")[0] in ("slipstream", "tasks", "workflows"):
            del sys.modules[name]
    sys.path.insert(0, str(project))
    pyflyte.main(args=arguments, prog_name="pyflyte")
