"""A training whose state alone does not fit is refused before any process starts, by arithmetic."""

from pathlib import Path
from typing import Any

import pytest
from flytekit.types.directory import FlyteDirectory
from torch import nn

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.memory import lasting
from slipstream.pipeline.train.memory.choices import TraceJob, trace_all
from slipstream.pipeline.train.memory.command import rows_of_tokens
from slipstream.pipeline.train.memory.lasting import ModelState, check_fits
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.machine import limits
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.profiles.profile import Placement
from slipstream.shared.telemetry.preflight import GpuMemory
from tests.support.tokens import LENGTH, SIZES
from tests.support.training import SMALL, table_of_numbers
from tests.support.wording import refuses

SIGNATURE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
#: In bytes: all weights, and those that are trained.
STATE = ModelState(weights=800, trained=240)


def test_the_state_is_counted_by_hand() -> None:
    model = build_model(ModelConfig(arguments={"hidden": [7]}), SIGNATURE, 0)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert ModelState.of(model, TrainingConfig()) == ModelState(4 * numbers, 4 * numbers)
    assert ModelState.of(model, TrainingConfig(ema=0.9)).averaged == 4 * numbers
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert ModelState.of(model, TrainingConfig(ema=0.9)) == ModelState(4 * numbers, 0), "what is frozen has no average"


@pytest.mark.parametrize(
    ("parallel", "processes", "expected"),
    [
        ({}, 4, 800 + 3 * 240),
        ({"shard": "weights"}, 4, (800 + 3 * 240) // 4),
        ({"shard": "weights", "replicas": 2}, 4, (800 + 3 * 240) // 2),
        ({"shard": "gradients"}, 4, (800 + 2 * 240) // 4 + 800),
        ({"shard": "optimizer"}, 1, 800 + 3 * 240),
        ({"tensor": 2}, 4, (800 + 3 * 240) // 2),
        ({"pipeline": 2, "shard": "weights"}, 4, (800 + 3 * 240) // 4),
        ({"shard": "weights", "offload": True}, 4, 0),
    ],
)
def test_a_layout_divides_it(parallel: dict[str, Any], processes: int, expected: int) -> None:
    assert STATE.of_process(ParallelConfig(**parallel), processes, 1, "fp32") == expected


def test_gathered_weights_have_the_type_that_is_computed_in() -> None:
    gradients = ParallelConfig(shard="gradients")
    assert STATE.of_process(gradients, 4, 1, "bf16") == (800 + 2 * 240) // 4 + 400


@pytest.mark.prove
def test_a_traced_step_takes_more_and_not_many_times_as_much() -> None:
    model = ModelConfig("transformer", {**SIZES, "vocab_size": 48, "hidden_size": 128, "num_hidden_layers": 4})
    signature = rows_of_tokens(ModelOrigin(model), LENGTH)
    layouts: list[dict[str, Any]] = [
        {},
        *({"shard": shard} for shard in ("optimizer", "gradients", "weights")),
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "shard": "weights"},
    ]
    state = ModelState.of(build_model(model, signature, 0, shapes_alone=True), TrainingConfig())
    jobs = [
        TraceJob(model, signature, TrainingConfig(batch_size=8, accumulation=2, precision=kind, parallel=parallel), 4)
        for parallel in (ParallelConfig(**layout) for layout in layouts)
        for kind in ("fp32", "bf16")
    ]
    for job, traced in zip(jobs, trace_all(jobs), strict=True):
        least = state.of_process(job.training.parallel, 4, 1, job.training.precision)
        assert traced.peak is not None and least <= traced.peak <= 4 * least, (job.training, least, traced.found)


def test_too_little_for_the_state_is_one_line_with_a_layout_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = table_of_numbers(tmp_path / "data", 30)
    wide = ModelConfig("mlp", {"hidden": [4096, 4096]})
    monkeypatch.setenv(limits.MEMORY, "600Mi")
    with refuses(UserError):
        check_fits(data, wide, TrainingConfig(), 4, 1)
    check_fits(data, wide, TrainingConfig(), 2, 1)
    check_fits(data, wide, TrainingConfig(parallel=ParallelConfig(shard="weights")), 4, 1)
    with refuses(UserError):
        monkeypatch.setenv(limits.MEMORY, "150Mi")
        check_fits(data, wide, TrainingConfig(), 1, 1)
    check_fits(data, SMALL, TrainingConfig(), 4, 1)


def test_a_gpu_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = table_of_numbers(tmp_path / "data", 30)
    wide = ModelConfig("mlp", {"hidden": [4096, 4096]})
    gpus = [GpuMemory("GPU 0 (large)", 2**30, 0, 0), GpuMemory("GPU 1 (small)", 2**27, 0, 0)]
    monkeypatch.setattr(lasting, "visible_gpus", lambda: 2)
    monkeypatch.setattr(lasting, "visible_memory", lambda _: gpus)
    with refuses(UserError):
        check_fits(data, wide, TrainingConfig(), 2, 1)
    with pytest.raises(UserError, match=r"and GPU 1 \(small\) has 128 MiB"):
        check_fits(data, wide, TrainingConfig(), 4, 2)
    check_fits(data, wide, TrainingConfig(), 1, 1)
    check_fits(data, wide, TrainingConfig(), 2, 2)


def test_flytes_task_asks_before_it_starts_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train import check_before_training

    data, placement = table_of_numbers(tmp_path / "data", 30), Placement(memory="100Mi")
    inputs = {"prepared": FlyteDirectory(str(data)), "training": TrainingConfig(batch_size=16), "model": SMALL}
    monkeypatch.setenv(limits.MEMORY, placement.memory)
    check_before_training(inputs, placement)
    with refuses(UserError):
        check_before_training({**inputs, "model": ModelConfig("mlp", {"hidden": [4096, 4096]})}, placement)


class OnTheHost(nn.Module):
    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.layer = nn.Linear(5, signature.outputs)
        self.scale = float(self.layer.weight.std())  # has no value on the meta device

    def forward(self, numeric: Any) -> Any:
        return self.layer(numeric) * self.scale


def test_what_cannot_be_built_without_memory_is_left_to_the_processes(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 30)
    check_fits(data, ModelConfig(f"{__name__}:OnTheHost"), TrainingConfig(), 1, 1)
