"""Properties of every task, in all modules."""

import importlib
import pkgutil

import pytest
from flytekit import PythonFunctionTask

import tasks
import workflows
from slipstream.flyte.elastic import DistributedTask
from slipstream.flyte.stage import map_errors


def all_tasks() -> dict[str, PythonFunctionTask]:
    """Every task of this project, by its name."""
    modules = [
        importlib.import_module(found.name)
        for package in (tasks, workflows)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not found.ispkg
    ]
    values = (value for module in modules for value in vars(module).values())
    return {value.name: value for value in values if isinstance(value, PythonFunctionTask)}


TASKS = all_tasks()


def test_the_tasks_are_found() -> None:
    assert len(TASKS) >= 30 and {"tasks.train.train", "tasks.report.report"} < TASKS.keys()


@pytest.mark.parametrize("name", sorted(TASKS))
def test_its_errors_are_mapped(name: str) -> None:
    """A store that stays away is retried by every task; the agent of a distributed one does it around all it does."""
    entity = TASKS[name]
    mapped = map_errors(lambda: None).__code__
    assert isinstance(entity, DistributedTask) or entity.task_function.__code__ is mapped
