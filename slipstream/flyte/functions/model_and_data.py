"""Common inputs of tasks after training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import PythonFunctionTask, task
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.stage import local_path, map_errors, rows_path

if TYPE_CHECKING:
    from slipstream.shared.artifacts.prepared.data import PreparedData
    from slipstream.shared.models.trained import TrainedModel


@dataclass(frozen=True)
class ModelAndData:
    """Trained model and prepared data; ``factory`` is the user's own model factory, or ""."""

    trained: FlyteDirectory
    prepared: FlyteDirectory
    factory: str = ""

    @cached_property
    def trained_path(self) -> Path:
        return local_path(self.trained)

    @cached_property
    def data(self) -> PreparedData:
        """Prepared data, opened once per task; rows are downloaded when read."""
        from slipstream.shared.artifacts.prepared.streamed import open_prepared

        return open_prepared(rows_path(self.prepared))

    def open(self) -> tuple[TrainedModel, PreparedData]:
        """Return a new instance of the model, and the data."""
        from slipstream.shared.models.trained import TrainedModel

        return TrainedModel.open(self.trained_path, self.factory), self.data


def registered(function: Callable[..., Any], module: str, **metadata: Any) -> PythonFunctionTask:
    """Return the task ``module.<function>`` with the keyword arguments ``metadata`` of flytekit's ``task``.

    flytekit names a task after the module of its function, which pods import.
    """

    @functools.wraps(function)
    def work(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    work.__module__ = module
    return task(**metadata)(map_errors(work))
