"""The ONNX file: dynamic batch size, equal to torch, independent of the exporting machine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export.convert import (
    PARITY_BATCHES,
    check_dynamic_batch,
    check_opset,
    check_parity,
    model_opset,
    to_onnx,
)
from slipstream.pipeline.export.quantize.quantise import Quantiser
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.predict import model_function, record_inputs
from slipstream.shared.models.tables_and_images import ResNet
from tests.support.proving import first_few
from tests.support.toys import ToyTrained, images, trained_on
from tests.support.wording import refuses


@dataclasses.dataclass
class Exported:
    """A toy, exported once for all tests of this file."""

    data: PreparedData
    trained: ToyTrained
    path: Path

    def inputs(self, rows: int) -> tuple[np.ndarray, ...]:
        return record_inputs(self.data.signature, self.data.split("test")[:rows])


@pytest.fixture(scope="module", params=first_few(["image", "table", "regression"]))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    directory = tmp_path_factory.mktemp(request.param)
    makers = {
        "table": lambda path: write_table(path, "classification"),
        "image": images,
        "regression": lambda path: write_table(path, "regression"),
    }
    data = makers[request.param](directory / "data")
    trained = trained_on(data, steps=20)
    found = Exported(data, trained, directory / "model.onnx")
    to_onnx(trained.load(), data.signature, found.inputs(2), 20, found.path)
    return found


def test_any_batch_gives_what_torch_gives(exported: Exported) -> None:
    torch_run, onnx_run = model_function(exported.trained.load()), onnx_predictor(exported.path, 1)
    for rows in (1, 2, 3, 5, 32, 299):
        expected = torch_run(exported.inputs(rows))
        assert onnx_run(exported.inputs(rows)) == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert expected.shape == (rows, exported.data.signature.outputs)


def test_the_file_says_what_it_takes(exported: Exported) -> None:
    model = onnx.load(exported.path)
    assert [value.name for value in model.graph.input] == [spec.name for spec in exported.data.signature.inputs]
    shapes = [value.type.tensor_type.shape.dim for value in (*model.graph.input, *model.graph.output)]
    assert {shape[0].dim_param for shape in shapes} == {"batch"}
    assert model_opset(model) == 20


def test_nothing_of_this_machine_is_in_the_file(exported: Exported) -> None:
    content = exported.path.read_bytes()
    assert str(Path(__file__).parent).encode() not in content
    assert b"stack_trace" not in content
    assert [path.name for path in exported.path.parent.glob("*.onnx*")] == ["model.onnx"]


def test_exporting_again_gives_the_same_bytes(exported: Exported, tmp_path: Path) -> None:
    to_onnx(exported.trained.load(), exported.data.signature, exported.inputs(2), 20, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == exported.path.read_bytes()


def test_a_tampered_weight_is_found(exported: Exported, tmp_path: Path) -> None:
    torch_run = model_function(exported.trained.load())
    check_parity(torch_run, onnx_predictor(exported.path, 1), exported.inputs(32))
    model = onnx.load(exported.path)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = numpy_helper.to_array(weight).copy()
    values *= 1.01
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "tampered.onnx")
    with refuses(UserError):
        check_parity(torch_run, onnx_predictor(tmp_path / "tampered.onnx", 1), exported.inputs(32))


def test_parity_looks_at_every_batch_size() -> None:
    """A model that is only wrong from 32 rows on, or only at one, is found all the same."""
    inputs = [np.arange(12, dtype=np.float32).reshape(4, 3)]

    def right(batch: Sequence[np.ndarray]) -> np.ndarray:
        return batch[0] + 1

    for wrong_at in PARITY_BATCHES:

        def wrong(batch: Sequence[np.ndarray], at: int = wrong_at) -> np.ndarray:
            return right(batch) + (len(batch[0]) == at)

        with refuses(UserError):
            check_parity(right, wrong, inputs)


def test_parity_refuses_nan() -> None:
    inputs = [np.ones((2, 3), np.float32)]
    with refuses(UserError):
        check_parity(lambda batch: batch[0], lambda batch: batch[0] * np.nan, inputs)


def test_a_fixed_batch_is_refused(exported: Exported) -> None:
    for part in ("input", "output"):
        model = onnx.load(exported.path)
        getattr(model.graph, part)[0].type.tensor_type.shape.dim[0].dim_value = 2
        with refuses(UserError):
            check_dynamic_batch(model)


def test_another_opset_than_asked_for_is_refused(exported: Exported) -> None:
    model = onnx.load(exported.path)
    check_opset(model, 20)
    with refuses(UserError, match=r"export\.opset:"):
        check_opset(model, 19)


class DependsOnBatch(nn.Module):
    """torch.export follows only the branch that its example takes, and fixes the batch without a word."""

    def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
        return numeric[:, :2] * 2 if len(numeric) == 2 else numeric[:, :2]


class DependsOnValues(nn.Module):
    """torch.export cannot follow a branch on the values of its inputs at all."""

    def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
        return numeric[:, :2] * 2 if numeric.sum() > 0 else numeric[:, :2]


@pytest.mark.parametrize("model", first_few([DependsOnBatch(), DependsOnValues()]))
def test_a_model_that_cannot_be_exported_is_refused_in_one_silent_line(
    model: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_table(tmp_path / "data", "classification")
    inputs = record_inputs(data.signature, data.split("test")[:2])
    with refuses(UserError):
        to_onnx(model, data.signature, inputs, 20, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(("norm", "left"), first_few([("batch", False), ("group", True)]))
def test_batch_normalisation_is_folded_away(norm: str, left: bool, tmp_path: Path) -> None:
    data = images(tmp_path / "data")
    model = ResNet(data.signature, widths=(8, 16), norm=norm)
    with torch.no_grad():  # statistics that are not those of the start
        model(torch.rand(64, 1, 9, 9) * 8)
    inputs = [array.astype(np.float32) for array in record_inputs(data.signature, data.split("test")[:2])]
    floats = dataclasses.replace(
        data.signature, inputs=tuple(dataclasses.replace(i, dtype="float32") for i in data.signature.inputs)
    )
    to_onnx(model.eval(), floats, inputs, 20, tmp_path / "model.onnx")
    check_parity(model_function(model), onnx_predictor(tmp_path / "model.onnx", 1), inputs)
    prepared = Quantiser(tmp_path / "model.onnx", inputs, tmp_path, 7).prepared(smooth=False)
    operators = {node.op_type for node in onnx.load(prepared).graph.node}
    assert bool(operators & {"BatchNormalization", "InstanceNormalization", "GroupNormalization"}) is left


@pytest.mark.parametrize("arguments", [{"norm": "layer"}, {"norm": "batch", "widths": (4,) * 5}])
def test_a_norm_that_cannot_be_is_refused(arguments: Any, tmp_path: Path) -> None:
    with refuses(UserError):
        build_model(ModelConfig("resnet", arguments), images(tmp_path / "data").signature, seed=0)


@pytest.mark.prove
def test_a_transformer_whose_heads_share_keys_can_be_quantised(tmp_path: Path) -> None:
    """torch's exporter writes axes for it as numbers, on which the inference of shapes fails."""
    signature = Signature((TensorSpec("tokens", "int32", (8,)),), "next token", "next token", buckets=20)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = build_model(ModelConfig("transformer", {**sizes, "num_key_value_heads": 2}), signature, 0).eval()
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    to_onnx(model, signature, [tokens], 20, tmp_path / "fp32.onnx")
    graph = onnx.load(tmp_path / "fp32.onnx").graph
    dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    axes = [dims[node.input[1]] for node in graph.node if node.op_type == "Unsqueeze"]
    assert axes and all(each == [1] for each in axes)
    assert dims.keys() <= {name for node in graph.node for name in node.input}, "nothing is left over"
    check_parity(model_function(model), onnx_predictor(tmp_path / "fp32.onnx", 1), [tokens])
    Quantiser(tmp_path / "fp32.onnx", [tokens], tmp_path, bits=7).prepared(smooth=False)
