"""Agreement of ranks with different GPUs: one precision and one backend."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.errors import UserError
from slipstream.shared.models import arithmetic
from slipstream.shared.models.arithmetic import DeviceCapability, common_precision
from tests.support import training
from tests.support.proving import first_few
from tests.support.training import log, refusal, table_of_numbers, trained
from tests.support.wording import refuses, same_wording

A100, T4, CPU = (
    DeviceCapability(gpu=True, bf16=True),
    DeviceCapability(gpu=True, bf16=False),
    DeviceCapability(gpu=False, bf16=False),
)


@pytest.mark.parametrize(
    ("wanted", "ranks", "found"),
    [
        ("auto", [A100, A100], "bf16"),
        ("auto", [A100, T4], "fp16"),
        ("auto", [T4, T4], "fp16"),
        ("auto", [A100, CPU], "fp32"),
        ("auto", [CPU, CPU], "fp32"),
        ("bf16", [A100, CPU], "bf16"),
        ("fp16", [A100, T4], "fp16"),
        ("fp32", [A100, T4], "fp32"),
    ],
)
def test_one_precision_that_all_have(wanted: str, ranks: list[DeviceCapability], found: str) -> None:
    assert common_precision(wanted, ranks) == common_precision(wanted, ranks[::-1]) == found


def test_what_one_gpu_cannot_is_refused() -> None:
    for ranks in ([A100, T4], [T4, CPU]):
        with refuses(UserError, match=r"training\.precision:"):
            common_precision("bf16", ranks)


def rank_of_two_kinds(rank: int, *arguments: Any) -> None:
    from slipstream.pipeline.train import run
    from slipstream.pipeline.train.memory import decision

    for module in (arithmetic, decision, run):
        vars(module)["device_capability"] = lambda device: T4 if rank else A100
    training.rank_body(rank, *arguments)


@pytest.mark.prove
@pytest.mark.parametrize("wanted", first_few(["auto", "bf16"]))
def test_a_t4_beside_an_a100(wanted: Literal["auto", "bf16"], tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 64)
    config = TrainingConfig(epochs=1, batch_size=64, precision=wanted)
    model = trained(prepared, tmp_path / "x", 2, config, body=rank_of_two_kinds)
    if wanted == "bf16":
        assert refusal(tmp_path / "x", 0) == refusal(tmp_path / "x", 1)
        assert refusal(tmp_path / "x", 0).startswith("training.precision: bf16 takes a GPU of")
        return
    assert json.loads((model / "history.json").read_text())["world"]["precision"] == "fp16"
    assert "training.precision: auto is fp16 on all ranks, as their devices differ" in log(tmp_path / "x")


@pytest.mark.prove
def test_a_pipeline_between_gpus_over_gloo_is_refused_without_flyte_as_well(tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 64)
    config = TrainingConfig(batch_size=64, backend="gloo", parallel=ParallelConfig(pipeline=2))
    trained(prepared, tmp_path / "x", 2, config, body=rank_of_two_kinds)
    for rank in range(2):
        same_wording(refusal(tmp_path / "x", rank))
