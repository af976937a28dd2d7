"""Trainings by the trainer itself, as the only rank, in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.artifacts.prepared.token_rows import write_token_rows
from slipstream.models.config import ModelConfig
from slipstream.train.config import TrainingConfig
from slipstream.train.run import run
from slipstream.train.setup import TrainingRequest
from tests.support.processes import free_port

#: Of the transformers whose numbers are looked at, not their speed.
LENGTH, VOCABULARY = 64, 256
SMALL_TRANSFORMER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def train(directory: Path, prepared: Path, model: ModelConfig, *, sampled: Path | None = None, **training: Any) -> Path:
    """Train in a process group of one; return the trained model.

    Its checkpoints are in the same directory, and its rank's counts in ``sampled``.
    """
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    where = {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in where.items()})
    try:
        run(
            TrainingRequest(
                prepared=prepared,
                model=model,
                training=TrainingConfig(patience=0, **training),
                directory=directory,
                home=f"{directory}.checkpoints",
                made_by={},
                sampled=sampled,
            )
        )
    finally:
        for name in where:
            os.environ.pop(name)
        os.environ.update(before)
    return directory


def train_transformer(directory: Path, prepared: Path, **training: Any) -> Path:
    """The small one, for a dozen steps."""
    return train(directory, prepared, ModelConfig("transformer", SMALL_TRANSFORMER), **training)


def write_tokens(directory: Path, rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Path:
    """Rows that can be learnt: every token is the one before, times three, plus one."""
    draw = np.random.default_rng(0)
    tokens = np.empty((rows, length + 1), np.int64)
    tokens[:, 0] = draw.integers(0, vocabulary, rows)
    for place in range(length):
        tokens[:, place + 1] = (3 * tokens[:, place] + 1) % vocabulary
    write_token_rows(directory, {"train": tokens, "validation": tokens[:4], "test": tokens[:4]}, vocabulary)
    return directory
