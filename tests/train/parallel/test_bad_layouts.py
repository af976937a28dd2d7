"""Impossible layouts end in one line that names the setting to change."""

from typing import Any

import pytest
import torch

from slipstream.operations.proofs.gpu.layouts import SIGNATURE, SIZES
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.parallel.layout import Layout, check_plan
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.plan import block_names, model_plan
from slipstream.shared.profiles.profile import load_profile
from tests.support.wording import refuses


@pytest.mark.parametrize(
    "settings",
    [
        {"shard": "all"},
        {"replicas": 2},
        {"offload": True},
        {"schedule": "interleaved", "pipeline": 2},
        {"stages_per_rank": 2, "pipeline": 2},
        {"schedule": "interleaved", "stages_per_rank": 2},
        {"tensor": 0},
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any]) -> None:
    with refuses(UserError):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "world"), [({"pipeline": 2, "tensor": 2}, 6), ({"shard": "weights", "replicas": 3}, 4)]
)
def test_sizes_that_do_not_multiply(settings: dict[str, Any], world: int) -> None:
    with refuses(UserError):
        ParallelConfig(**settings).sizes(world)


@pytest.mark.parametrize(
    ("settings", "micro_batches", "message"),
    [
        ({"tensor": 4}, 1, "training.parallel.tensor:"),
        ({"tensor": 3}, 1, "training.parallel.tensor:"),
        ({"pipeline": 5}, 8, "training.parallel.pipeline:"),
        ({"pipeline": 4}, 3, "training.accumulation:"),
        ({"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, 5, "training.accumulation:"),
    ],
)
def test_a_model_that_cannot_be_divided_so(settings: dict[str, Any], micro_batches: int, message: str) -> None:
    network = build_model(ModelConfig("transformer", SIZES), SIGNATURE, 0, empty=True).network
    with refuses(UserError, match=message):
        check_plan(ParallelConfig(**settings), model_plan(network), micro_batches)


def test_a_sequence_that_cannot_be_divided() -> None:
    odd = Signature((TensorSpec("tokens", "int64", (15,)),), "next token", "next token", buckets=256)
    network = build_model(ModelConfig("transformer", SIZES), odd, 0, empty=True).network
    with refuses(UserError):
        check_plan(ParallelConfig(tensor=2), model_plan(network), 1)
    check_plan(ParallelConfig(tensor=2, sequence=False), model_plan(network), 1)


def test_a_model_without_a_plan_is_only_sharded() -> None:
    images = Signature(
        (TensorSpec("image", "uint8", (1, 8, 8)),), "classification", "y", ("a", "b"), (), (0.0,), (1.0,)
    )
    resnet = build_model(ModelConfig("resnet", {"depth": 2}), images, 0).network
    for setting in ("tensor", "pipeline"):
        settings: dict[str, Any] = {setting: 2}
        with refuses(UserError, match=f"training.parallel.{setting}:"):
            check_plan(ParallelConfig(**settings), model_plan(resnet), 4)
    check_plan(ParallelConfig(shard="weights"), model_plan(resnet), 1)
    assert block_names(resnet) == tuple(f"blocks.{number}" for number in range(6))


def test_a_layout_that_does_not_fit_the_profile_ends_before_any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.config import RunConfig
    from tasks.config import read_config

    monkeypatch.setattr("tasks.config.current_profile", lambda: load_profile("a100-spot"))
    fits = RunConfig(training=TrainingConfig(parallel=ParallelConfig(shard="weights", tensor=8)))
    assert read_config.task_function(config=fits).training.parallel.tensor == 8
    wrong = RunConfig(training=TrainingConfig(parallel=ParallelConfig(tensor=3)))
    with refuses(Exception, match="training.parallel:"):
        read_config.task_function(config=wrong)


def test_what_no_layout_can_divide() -> None:
    from slipstream.pipeline.train.checks import check_divisible

    sharded = TrainingConfig(parallel=ParallelConfig(shard="weights"))
    with refuses(UserError, match="training.parallel:"):
        check_divisible(sharded, ModelTraits(has_batch_statistics=True), "fp32")
    with refuses(UserError, match="training.precision:"):
        check_divisible(sharded, ModelTraits(), "fp16")
    with refuses(UserError, match="training.ema:"):
        TrainingConfig(parallel=ParallelConfig(shard="weights"), ema=0.9)
    check_divisible(TrainingConfig(), ModelTraits(has_batch_statistics=True), "fp16")


def test_places_cover_the_mesh_and_neighbours_divide_tensors() -> None:
    config = ParallelConfig(shard="weights", replicas=2, pipeline=2, tensor=2)
    sizes = config.sizes(16)
    assert sizes == (2, 2, 2, 2)
    layouts = [Layout(config, rank, 16, sizes) for rank in range(16)]
    assert [x.coordinate("tensor") for x in layouts[:4]] == [0, 1, 0, 1]
    assert [x.data_rank for x in layouts] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert {x.data_size for x in layouts} == {4}
    assert [x.stages for x in layouts] == [(0,)] * 8 + [(1,)] * 8
    assert [x.has_losses for x in layouts] == [False] * 8 + [True] * 8
    plain = Layout.connect(ParallelConfig(), 3, 4, torch.device("cpu"))
    assert (plain.data_rank, plain.data_size, plain.mesh) == (3, 4, None)


def test_replicas_are_one_per_node_by_default() -> None:
    config = ParallelConfig(shard="weights", tensor=2)
    assert config.sizes(16, nodes=2) == (1, 2, 4, 2)
    assert config.sizes(16, nodes=1) == (1, 1, 8, 2)
    assert ParallelConfig(shard="weights", pipeline=2).sizes(32, nodes=4) == (2, 2, 8, 1)
    assert ParallelConfig(shard="weights", pipeline=2).sizes(8, nodes=1) == (2, 1, 4, 1)
    assert ParallelConfig(shard="weights", replicas=1).sizes(16, nodes=2) == (1, 1, 16, 1)
