"""Nested conditionals run only the branch that is taken, with any workflow module imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

#: Modules that define a conditional, by their import names.
MODULES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in (REPOSITORY / "workflows").rglob("*.py")
    if " conditional(" in path.read_text(encoding="utf-8")
)
#: The inner conditional stands in the outer one's last branch, where flytekit lets both share a state.
NESTED = """
import importlib, sys
importlib.import_module(sys.argv[1])
from flytekit import conditional, task, workflow

@task
def say(word: str) -> str:
    print("ran", word)
    return word

@workflow
def inner(size: str) -> str:
    chosen = conditional("size").if_(size == "given").then(say(word="given")).else_().then(say(word="searched"))
    say(word=chosen)
    return chosen

@workflow
def outer(method: str, size: str) -> str:
    return conditional("method").if_(method == "none").then(say(word="none")).else_().then(inner(size=size))

for method, size in (("none", "given"), ("prune", "given"), ("prune", "searched")):
    print("gave", outer(method=method, size=size))
"""


def test_every_module_with_a_conditional_is_found() -> None:
    assert {"workflows.compression", "workflows.scoring", "workflows.training"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_only_the_branch_that_is_taken_runs(module: str, tmp_path: Path) -> None:
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(script), module]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert ended.returncode == 0, ended.stderr
    # What follows the inner conditional in its branch runs, too.
    said = [line for line in ended.stdout.splitlines() if line.startswith(("ran ", "gave "))]
    expected = ["ran none", "gave none"]
    for word in ("given", "searched"):
        expected += [f"ran {word}", f"ran {word}", f"gave {word}"]
    assert said == expected
