"""Configuration of one run: all settings in one tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, cast

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.sweep.config import SweepConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.settings import Settings, settings, with_defaults
from slipstream.shared.source.config import DataConfig

if TYPE_CHECKING:
    from slipstream.shared.artifacts.prepared.data import PreparedData


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

    def for_data(self, data: PreparedData) -> RunConfig:
        """Return the settings with those that the number of training rows decides."""
        rows = data.training_rows
        return replace(self, training=self.training.for_rows(rows), model=self.model.for_rows(rows, data.signature))

    def for_training(self) -> TrainingConfig:
        """Return the training section, with settings from ``collectives`` if it applies results of the tuner."""
        # It names where the results are, not their content, so new results do not cause reruns.
        training = self.training
        if not training.network_profile:
            return training
        latest = training.network_profile == "latest"
        return replace(
            training,
            network_profile=self.collectives.history if latest else training.network_profile,
            network_numbers=training.network_numbers or self.collectives.numbers,
        )


@settings
class FineTuneConfig(RunConfig):
    """Settings of one run that fine-tunes a language model; its defaults train adapters of rank 16.

    With ``model.lora.rank`` null the default learning rate is :data:`FULL_LEARNING_RATE`.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(lora=LoraConfig(rank=16)))
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, batch_size=16, learning_rate=LEARNING_RATE, weight_decay=0.0)
    )

    def check(self) -> None:
        training = self.training
        if training.optimizer == "sgd" and training.learning_rate in (LEARNING_RATE, FULL_LEARNING_RATE):
            raise training.reject("learning_rate", "another with training.optimizer sgd: this one is AdamW's")

    @classmethod
    def defaults_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        lora: Any = given
        for name in ("model", "lora"):
            lora = lora.get(name) if isinstance(lora, Mapping) else None
        whole = isinstance(lora, Mapping) and lora.get("rank", 1) in (None, 0)
        full = {"training": {"learning_rate": FULL_LEARNING_RATE}} if whole else {}
        return cast("dict[str, Any]", with_defaults(super().defaults_for(given), full))


#: Default learning rate for adapters.
LEARNING_RATE = 2e-4
#: Default learning rate for all weights of a base, that of ``SFTConfig`` in Hugging Face's trl.
FULL_LEARNING_RATE = 2e-5
