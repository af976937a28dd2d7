"""The configuration of one run: everything a user can set, in one tree.

``python -m tasks.config > run.schema.json`` writes the JSON Schema by which editors complete and check ``run.yaml``.
"""

from __future__ import annotations

import json
from dataclasses import field, replace

from tasks.collectives.config import CollectivesConfig
from tasks.compress.config import CompressionConfig
from tasks.export.config import ExportConfig
from tasks.export.registry.config import PromotionConfig
from tasks.models.config import ModelConfig
from tasks.preprocess.config import DataConfig
from tasks.settings import Settings, described_schema_of, settings
from tasks.train.config import TrainingConfig


@settings
class RunConfig(Settings):
    """Each section goes to the stage it names and to no other, so that a change reruns only what depends on it."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    promotion: PromotionConfig = field(default_factory=PromotionConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)

    def for_training(self) -> TrainingConfig:
        """The section of training, with what it takes from ``collectives`` if it applies results of the tuner. What
        is found there is no part of it, so that a new result makes nothing run again."""
        training = self.training
        if not training.network_profile:
            return training
        latest = training.network_profile == "latest"
        return replace(
            training,
            network_profile=self.collectives.history if latest else training.network_profile,
            network_numbers=training.network_numbers or self.collectives.numbers,
        )


if __name__ == "__main__":
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    print(json.dumps({**dialect, **described_schema_of(RunConfig)}, indent=2))
