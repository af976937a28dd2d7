"""Runs ``pyflyte run`` as a user would: a process of its own, in an empty working directory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")

Run = Callable[..., subprocess.CompletedProcess[str]]


def run_in(
    directory: Path, *arguments: str, workflow: str = "train_and_export", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the main job, or another workflow of its file, in ``directory``; output is one text, as on a screen."""
    command = [PYFLYTE, "run", REPOSITORY / "workflows/training.py", workflow, *arguments]
    # A wide terminal keeps each message on one line inside its box.
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "COLUMNS": "600", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )


@pytest.fixture
def pyflyte_run(tmp_path: Path) -> Run:
    """``pyflyte_run("--data", "x.csv", ...)`` is :func:`run_in` the test's own directory."""
    return functools.partial(run_in, tmp_path)
