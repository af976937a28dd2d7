"""Runs ``pyflyte run`` as a user would: a process of its own, in an empty working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pyflyte_run(tmp_path: Path) -> Run:
    """``pyflyte_run("--data", "x.csv", ...)`` runs the main job, or another workflow of its file, in ``tmp_path``;
    output is one text, as on a screen."""

    def run(
        *arguments: str, workflow: str = "train_and_export", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [PYFLYTE, "run", REPOSITORY / "workflows/training.py", workflow, *arguments]
        # A wide terminal keeps each message on one line inside its box.
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "600", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
        )

    return run
