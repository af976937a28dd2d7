"""Flyte tasks of one function under several names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flytekit import PythonFunctionTask, task

from slipstream.flyte.stage import map_errors


def registered(function: Callable[..., Any], module: str, **metadata: Any) -> PythonFunctionTask:
    """Return the task ``module.<function>`` with the keyword arguments ``metadata`` of flytekit's ``task``.

    flytekit names a task after the module of its function, which pods import.
    """

    @functools.wraps(function)
    def work(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    work.__module__ = module
    return task(**metadata)(map_errors(work))
