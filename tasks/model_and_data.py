"""Inputs of tasks after training: a trained model and the prepared data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.types.directory import FlyteDirectory

from tasks.flyte.stage import local_path, rows_path

if TYPE_CHECKING:
    from slipstream.artifacts.prepared.data import PreparedData
    from slipstream.models.trained import TrainedModel


@dataclass(frozen=True)
class ModelAndData:
    """Trained model and prepared data; ``factory`` is named by the user's configuration, if any."""

    trained: FlyteDirectory
    prepared: FlyteDirectory
    factory: str = ""

    @cached_property
    def trained_path(self) -> Path:
        """Path of the model on this machine, downloaded on first use."""
        return local_path(self.trained)

    @cached_property
    def data(self) -> PreparedData:
        """The prepared data, shared by all stages of a task; rows are fetched as they are read."""
        from slipstream.artifacts.prepared.streamed import open_prepared

        return open_prepared(rows_path(self.prepared))

    def open(self) -> tuple[TrainedModel, PreparedData]:
        """Open both for a stage; every call returns a new model."""
        from slipstream.models.trained import TrainedModel

        return TrainedModel.open(self.trained_path, self.factory), self.data
