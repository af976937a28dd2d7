"""The configuration of one run: everything a user can set, in one tree."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.collectives.config import CollectivesConfig
from tasks.export.config import ExportConfig
from tasks.models.config import ModelConfig
from tasks.preprocess.config import DataConfig
from tasks.settings import Settings
from tasks.train.config import TrainingConfig


@dataclass(frozen=True)
class RunConfig(Settings):
    """Each section goes to the stage it names and to no other, so that a change reruns only what depends on it."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    export: ExportConfig = ExportConfig()
    collectives: CollectivesConfig = CollectivesConfig()
