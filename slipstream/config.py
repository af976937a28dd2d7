"""The configuration of one run: everything a user can set, in one tree."""

from __future__ import annotations

from dataclasses import field, replace

from slipstream.collectives.config import CollectivesConfig
from slipstream.compress.config import CompressionConfig
from slipstream.export.config import ExportConfig
from slipstream.models.config import ModelConfig
from slipstream.promote.config import PromotionConfig
from slipstream.score.config import ScoringConfig
from slipstream.settings import Settings, settings
from slipstream.source.config import DataConfig
from slipstream.sweep.config import SweepConfig
from slipstream.train.config import TrainingConfig


@settings
class RunConfig(Settings):
    """Each section goes to the stage it names and to no other, so that a change reruns only what depends on it."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    promotion: PromotionConfig = field(default_factory=PromotionConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

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
