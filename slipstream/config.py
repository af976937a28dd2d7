"""Configuration of one run: all settings in one tree."""

from __future__ import annotations

from dataclasses import field, replace

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.sweep.config import SweepConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.settings import Settings, settings
from slipstream.shared.source.config import DataConfig


@settings
class RunConfig(Settings):
    """Settings of one run.

    Every section goes only to the stages that use it, so a change reruns only dependent stages.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    promotion: PromotionConfig = field(default_factory=PromotionConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def for_rows(self, rows: int) -> RunConfig:
        return replace(self, training=self.training.for_rows(rows))

    def for_training(self) -> TrainingConfig:
        """Return the training section, with settings from ``collectives`` if it applies results of the tuner.

        The section names where the results are, not their content, so new results do not cause reruns.
        """
        training = self.training
        if not training.network_profile:
            return training
        latest = training.network_profile == "latest"
        return replace(
            training,
            network_profile=self.collectives.history if latest else training.network_profile,
            network_numbers=training.network_numbers or self.collectives.numbers,
        )
