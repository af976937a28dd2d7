"""Models and rows that cannot be exported end in one line, without an artifact."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.operations.proofs.gpu.trainings import write_prepared, write_table
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import TrainedModel
from tests.support.proving import first_few
from tests.support.toys import ToyTrained, images, trained_on
from tests.support.wording import refuses, same_wording

SHORT = ExportConfig(seconds=0.3)


class Network(nn.Module):
    """A linear layer, and something that a subclass does to its outputs."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.layer = nn.Linear(signature.inputs[0].shape[0], signature.outputs)

    def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> Any:
        return self.changed(self.layer(numeric), numeric)

    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> Any:
        raise NotImplementedError


class NoSuchOperator(Network):
    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return outputs * torch.linalg.svdvals(numeric).sum()


class BranchesOnValues(Network):
    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return outputs if numeric.sum() > 0 else -outputs


class MixesRows(Network):
    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return outputs - numeric.mean(dim=0).sum()


class OtherAtTwoRows(Network):
    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return outputs * (2 if len(numeric) == 2 else 3)


class Several(Network):
    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return outputs, numeric


class NotANumber(Network):
    def changed(self, outputs: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return outputs * float("nan")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return write_table(tmp_path_factory.mktemp("table") / "data", "classification")


def refusal(directory: Path, trained: ToyTrained, data: PreparedData, config: ExportConfig = SHORT) -> str:
    with pytest.raises(UserError) as refused:
        engine.export(directory / "out", cast(TrainedModel, trained), data, config, {})
    assert "\n" not in refused.value.message and not (directory / "out" / MANIFEST).exists()
    return refused.value.message


@pytest.mark.parametrize(
    "network", first_few([NoSuchOperator, BranchesOnValues, OtherAtTwoRows, MixesRows, NotANumber], 2)
)
def test_a_model_that_cannot_be_exported(network: type[Network], data: PreparedData, tmp_path: Path) -> None:
    trained = ToyTrained(data.signature, network(data.signature))
    same_wording(refusal(tmp_path, trained, data))


def test_several_outputs_are_refused_when_the_model_is_built(data: PreparedData) -> None:
    with refuses(UserError, match=r"model\.name:"):
        build_model(ModelConfig("tests.export.test_bad_models:Several"), data.signature, seed=0)


def other(data: PreparedData, **changes: Any) -> PreparedData:
    return dataclasses.replace(data, signature=dataclasses.replace(data.signature, **changes))


def test_data_that_is_not_the_models(data: PreparedData, tmp_path: Path) -> None:
    trained = trained_on(data, 1)
    said = refusal(tmp_path / "1", trained, images(tmp_path / "images"))
    same_wording(said)
    said = refusal(tmp_path / "2", trained, other(data, cardinalities=(5, 9)))
    assert "cardinalities of (5, 9) instead of (5, 7)" in said
    said = refusal(tmp_path / "3", trained, other(data, inputs=data.signature.inputs[:1]))
    same_wording(said)
    many = other(data, classes=tuple(f"class {number}" for number in range(1000)))
    assert len(refusal(tmp_path / "4", trained, many)) < 500


def test_too_few_rows_to_calibrate(data: PreparedData, tmp_path: Path) -> None:
    """Variants with ranges are skipped with the reason; the requested file for TensorRT is refused."""
    splits = {name: np.array(data.split(name)) for name in ("train", "validation", "test")}
    few = write_prepared(tmp_path / "few", data.signature, {**splits, "train": splits["train"][:15]})
    trained = cast(TrainedModel, trained_on(data, 1))
    report = engine.export(tmp_path / "out", trained, few, SHORT, {}).read_json("export.json")
    reasons = {each["recipe"]: each["reason"] for each in report["variants"]}
    why = "export.calibration_rows: the training split has 15 rows for calibration; expected at least 16"
    assert why not in reasons["dynamic"]
    same_wording(reasons["u8s8-smooth"])
    asked = ExportConfig(seconds=0.3, tensorrt=True)
    assert refusal(tmp_path / "again", trained_on(data, 1), few, asked) == why
    with refuses(UserError, match=r"export\.calibration_rows:"):
        ExportConfig(calibration_rows=8)
