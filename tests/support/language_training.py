"""A small transformer trained on prepared text, step by step in this process, as a training of one process does."""

from typing import Any

import torch

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.optimizer import make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from tests.support.groups import ALONE


def trained_steps(data: PreparedData, sizes: dict[str, Any], config: TrainingConfig, steps: int) -> Predictor:
    """The model after ``steps`` steps of a training that is as long."""
    model = build_model(ModelConfig("transformer", sizes), data.signature, config.seed)
    device = torch.device("cpu")
    state = TrainingState(
        ReplicatedModel(model),
        make_optimizer(model, config),
        LossScaler(device, enabled=False),
        copy_weights(model),
        Progress(),
        ModelTraits(),
    )
    order = GlobalOrder(stored_blocks(data, "train"), config.rows_per_step, config.seed)
    batches = training_batches(data, order, ALONE, stop=steps * config.rows_per_step)
    for step, batch in zip(range(steps), batches, strict=False):
        state.progress.step = step
        train_step(state, config, ALONE, "fp32", batch, steps)
    assert state.progress.step == steps - 1
    return model.eval()


def parameters(model: Predictor) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
