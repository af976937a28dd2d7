"""What several processes of the tests need is made once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def shared_place(factory: pytest.TempPathFactory) -> Path:
    """Return the directory of this run that all processes of the tests have in common."""
    place = factory.getbasetemp()
    return place.parent if "PYTEST_XDIST_WORKER" in os.environ else place


def made_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Return ``target``, made by the first process that asks for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    done = target.with_name(f"{target.name}.done")
    with FileLock(target.with_name(f"{target.name}.lock")):
        if not done.exists():
            make(target)
            done.touch()
    return target
