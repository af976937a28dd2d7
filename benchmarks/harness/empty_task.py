"""A task that does nothing, in a module that imports what it is told to: what is left is what any such pod costs."""

import importlib
import os

from flytekit import task

#: The environment variable with the modules to import, separated by spaces.
IMPORTS = "EMPTY_TASK_IMPORTS"

for module in os.environ.get(IMPORTS, "").split():
    importlib.import_module(module)


@task
def empty() -> None:
    """Nothing."""
