"""Row weights: never a feature, stored with the row, and in training a weight of 2 equals the row twice."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.source.config import DataConfig
from tests.support.groups import ALONE
from tests.support.tables import Prepare
from tests.support.wording import refuses

ROWS = 400
DRAW = np.random.default_rng(0)
COLUMNS = {"id": np.arange(ROWS), "x": DRAW.normal(size=ROWS), "z": DRAW.integers(0, 9, ROWS)}
TARGETS = {"classes": DRAW.choice(["a", "b", "c"], ROWS), "numbers": DRAW.normal(size=ROWS)}


def test_weights_are_stored_with_a_mean_of_one_and_are_no_feature(prepared: Prepare) -> None:
    weights = DRAW.uniform(0, 10, ROWS)
    table = pa.table({**COLUMNS, "w": weights, "y": TARGETS["classes"]})
    data = prepared(table, weight="w")
    assert data.signature.inputs[0].shape == (2,) and data.signature.weight == "w"
    assert next(column["role"] for column in data.card["columns"] if column["name"] == "w") == "weight"
    assert abs(data.split("train")["weight"].mean() - 1) < 1e-6
    plain = prepared(table.drop_columns("w"))
    for split in SPLITS:
        # Another weighing moves no row into another split.
        np.testing.assert_array_equal(plain.split(split)["target"], data.split(split)["target"])


def test_rows_with_impossible_weights_are_set_aside(prepared: Prepare) -> None:
    weights: list[float | None] = [1.0, 2.0] * (ROWS // 2)
    weights[3], weights[5], weights[7] = -1.0, None, float("nan")
    data = prepared(pa.table({**COLUMNS, "w": weights, "y": TARGETS["classes"]}), weight="w")
    rows = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    assert [(row["line"], row["column"], row["reason"]) for row in rows] == [
        (4, "w", "the weight is negative"),
        (6, "w", "the weight is missing"),
        (8, "w", "the weight is missing"),
    ]


@pytest.mark.parametrize(
    ("column", "settings", "expected"),
    [
        (["a"] * ROWS, {}, r"data\.weight:"),
        ([0.0] * ROWS, {}, r"data\.weight:"),
        ([1.0] * ROWS, {"drop": ["w"]}, r"data\.drop:"),
    ],
)
def test_what_cannot_weigh_is_refused(prepared: Prepare, column: list[object], settings: dict, expected: str) -> None:
    with refuses(UserError, match=expected):
        prepared(pa.table({**COLUMNS, "w": column, "y": TARGETS["classes"]}), weight="w", **settings)
    with refuses(UserError, match=r"data\.weight:"):
        DataConfig(weight="x", group="x")


def after_one_step(prepared: Prepare, table: pa.Table, **settings: object) -> list[np.ndarray]:
    """The weights of a network after one plain gradient step over the whole training split as one batch.

    Standardisation, which row weights do not enter, is undone, so that the network sees the same numbers both times.
    """
    data = prepared(table, **settings)
    order = GlobalOrder(stored_blocks(data, "train"), 10**6, seed=0)
    batch = next(training_batches(data, order, ALONE, 0, order.largest))
    fitted = data.artifact.read_json("statistics.json")["numeric"][0]
    batch = batch._replace(inputs=(batch.inputs[0] * fitted["std"] + fitted["mean"],))
    signature = replace(data.signature, target_mean=0.0, target_std=1.0)
    model = build_model(ModelConfig(arguments={"hidden": [8], "frequencies": 0}), signature, seed=0)
    optimizer, scaler = torch.optim.SGD(model.parameters()), LossScaler(torch.device("cpu"), enabled=False)
    state = TrainingState(ReplicatedModel(model), optimizer, scaler, {}, Progress())
    config = TrainingConfig(learning_rate=1.0, warmup=0, clip_norm=0, accumulation=1)
    train_step(state, config, ALONE, "fp32", batch, 2)
    return [p.detach().numpy() for p in model.parameters()]


@pytest.mark.parametrize("task", TARGETS)
def test_weight_two_is_the_row_twice(prepared: Prepare, task: str) -> None:
    weights = np.where(np.arange(ROWS) % 3 == 0, 2.0, 1.0)
    table = pa.table({"id": COLUMNS["id"], "x": COLUMNS["x"], "y": TARGETS[task], "w": weights})
    twice = np.repeat(np.arange(ROWS), weights.astype(int))
    doubled = table.take(pa.array(twice)).drop_columns("w")
    one = after_one_step(prepared, table, weight="w", id="id")
    two = after_one_step(prepared, doubled, id="id")
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
