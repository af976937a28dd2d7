"""The configuration of one run: everything a user can set, in one tree.

``python -m tasks.config > run.schema.json`` writes the JSON Schema by which editors complete and check ``run.yaml``.
"""

from __future__ import annotations

import json
from dataclasses import field

from tasks.collectives.config import CollectivesConfig
from tasks.compress.config import CompressionConfig
from tasks.export.config import ExportConfig
from tasks.export.registry.config import PromotionConfig
from tasks.models.config import ModelConfig
from tasks.preprocess.config import DataConfig
from tasks.settings import Settings, schema_of, settings
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


if __name__ == "__main__":
    print(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema_of(RunConfig)}, indent=2))
