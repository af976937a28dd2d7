"""Common inputs of tasks after training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.stage import local_path, rows_path

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
