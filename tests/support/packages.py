"""Exported models, made by the real export from small models in a moment."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.trained import TrainedModel
from tests.support.toys import trained_on


def package(
    directory: Path, data: PreparedData, steps: int = 150, threshold: float | None = None, **settings: Any
) -> Path:
    """A model trained for ``steps`` on ``data`` and exported to ``directory``, which is returned."""
    made_by = {"prepared": data.artifact.fingerprint, "trained": "b" * 64, "code": "c" * 16}
    trained = cast(TrainedModel, replace(trained_on(data, steps), threshold=threshold))
    engine.export(directory, trained, data, ExportConfig(seconds=0.1, **settings), made_by)
    return directory
