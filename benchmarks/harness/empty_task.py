"""Flyte task that does nothing, in a module with configurable imports, to measure the overhead of a pod."""

import importlib
import os

from flytekit import task

#: Environment variable with the modules to import, separated by spaces.
IMPORTS = "EMPTY_TASK_IMPORTS"

for module in os.environ.get(IMPORTS, "").split():
    importlib.import_module(module)


@task
def empty() -> None:
    """Do nothing."""
