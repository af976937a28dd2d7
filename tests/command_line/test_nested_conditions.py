"""Nested conditionals run only the branch that is taken, with any workflow module imported."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.processes import FORK
from tests.support.proving import first_few

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


def run(script: Path, module: str, log: Path) -> None:
    """The body of a process that has flytekit, and no module of workflows or tasks."""
    assert not {name for name in sys.modules if name.split(".")[0] in ("workflows", "tasks.train")}
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(REPOSITORY)
    sys.argv = [str(script), module]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("module", first_few(MODULES))
def test_only_the_branch_that_is_taken_runs(module: str, tmp_path: Path) -> None:
    script, log = tmp_path / "nested.py", tmp_path / "log"
    script.write_text(NESTED)
    process = FORK.Process(target=run, args=(script, module, log))
    process.start()
    process.join(60)
    assert process.exitcode == 0, log.read_text()
    # What follows the inner conditional in its branch runs, too.
    said = [line for line in log.read_text().splitlines() if line.startswith(("ran ", "gave "))]
    expected = ["ran none", "gave none"]
    for word in ("given", "searched"):
        expected += [f"ran {word}", f"ran {word}", f"gave {word}"]
    assert said == expected
