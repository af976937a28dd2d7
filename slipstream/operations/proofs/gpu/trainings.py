"""Trainings by the trainer as the only rank, in this process, and prepared rows for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.operations.proofs.processes import free_port
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.pipeline.train.run import run_attempt
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.card import CARD, DataCard
from slipstream.shared.artifacts.prepared.data import KIND, TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.models.config import ModelConfig

#: Sizes of the transformers that are checked for their numbers, not for their speed.
LENGTH, VOCABULARY = 64, 256
SMALL_TRANSFORMER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
#: Rows of the splits of a table.
TABLE_ROWS = {"train": 600, "validation": 40, "test": 300}


def train(directory: Path, prepared: Path, model: ModelConfig, *, sampled: Path | None = None, **training: Any) -> Path:
    """Train in a process group of one; return the directory of the model, which has the checkpoints next to it."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    where = {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in where.items()})
    try:
        run_attempt(
            TrainingRequest(
                prepared=prepared,
                model=model,
                training=TrainingConfig(**{"patience": 0, "compile": False, **training}),
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
    return train(directory, prepared, ModelConfig("transformer", SMALL_TRANSFORMER), **training)


def write_tokens(
    directory: Path, rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY, *, documents: int = 0
) -> Path:
    """Write rows in which every token follows from the last: times three, plus one.

    With ``documents`` as many start in every row, with token 0, and attention keeps them apart.
    """
    draw = np.random.default_rng(0)
    tokens = np.empty((rows, length + 1), np.int64)
    tokens[:, 0] = draw.integers(0, vocabulary, rows)
    for place in range(length):
        tokens[:, place + 1] = (3 * tokens[:, place] + 1) % vocabulary
    if documents:
        tokens[tokens == 0] = 1
        tokens[:, : length // documents * documents : length // documents] = 0
    splits = {"train": tokens, "validation": tokens[:4], "test": tokens[:4]}
    write_token_rows(directory, splits, vocabulary, document_end=0 if documents else -1)
    return directory


def write_prepared(directory: Path, signature: Signature, splits: dict[str, np.ndarray]) -> PreparedData:
    writer = ArtifactWriter(directory)
    for split, records in splits.items():
        with writer.create(f"{split}-00000.rows", block_bytes=signature.record.itemsize * 64) as file:
            file.write(records.view(np.uint8))
    write_record(writer, "signature.json", signature)
    writer.write_json("schema.json", {"columns": []})
    writer.write_json("statistics.json", {"columns": {}})
    rows = {split: len(records) for split, records in splits.items()}
    counts = {"read": sum(rows.values()), "kept": sum(rows.values()), "quarantined": 0, **rows}
    writer.write_json(CARD, DataCard("", counts, signature.task, signature.target, columns=[], classes={}).to_json())
    writer.finish(KIND, {})
    return PreparedData.open(directory)


def write_table(directory: Path, task: str) -> PreparedData:
    """Write a separable problem of six numbers and two categories; regression has a target near 1000, of spread 50."""
    rng = np.random.default_rng(0)
    inputs = (TensorSpec("numeric", "float32", (6,)), TensorSpec("categorical", "int32", (2,)))
    classes = ("no", "yes") if task == "classification" else ()
    signature = Signature(inputs, task, "answer", classes, (5, 7), target_mean=1000.0, target_std=50.0)
    splits = {}
    for split, rows in TABLE_ROWS.items():
        records = np.zeros(rows, signature.record)
        records["numeric"] = rng.normal(size=(rows, 6))
        records["categorical"] = rng.integers(0, (5, 7), size=(rows, 2))
        score = records["numeric"][:, 0] + records["numeric"][:, 1] + (records["categorical"][:, 0] > 2)
        records[TARGET] = score > 0.4 if classes else 1000 + 50 * score
        splits[split] = records
    return write_prepared(directory, signature, splits)
