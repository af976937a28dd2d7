"""What tasks after training are given: a trained model, and the prepared data whose rows it is run over."""

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
    """``factory`` is the one that the user's configuration names, if any."""

    trained: FlyteDirectory
    prepared: FlyteDirectory
    factory: str = ""

    @cached_property
    def trained_path(self) -> Path:
        """Where the model is on this machine, fetched when a stage first needs it."""
        return local_path(self.trained)

    @cached_property
    def data(self) -> PreparedData:
        """Its rows are fetched as they are read, and once for all stages of a task."""
        from slipstream.artifacts.prepared.streamed import open_prepared

        return open_prepared(rows_path(self.prepared))

    def open(self) -> tuple[TrainedModel, PreparedData]:
        """Both as a stage reads them; each stage gets a model of its own."""
        from slipstream.models.trained import TrainedModel

        return TrainedModel.open(self.trained_path, self.factory), self.data
