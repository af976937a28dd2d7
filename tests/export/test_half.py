"""FP16 and BF16 files for GPUs: matmuls in 16 bits and sums in FP32, checked without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import to_onnx
from slipstream.pipeline.export.quantize.half_precision import Half, largest_output_error, write_half
from slipstream.pipeline.export.quantize.quantise import Quantiser
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.models.predict import record_inputs
from slipstream.shared.models.trained import TrainedModel
from tests.support.toys import images, trained_on
from tests.support.wording import refuses

TYPES: dict[Half, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def exported(directory: Path, data: PreparedData, opset: int) -> tuple[Path, tuple[np.ndarray, ...]]:
    inputs = record_inputs(data.signature, data.split("train")[:32])
    to_onnx(trained_on(data, 40).load(), data.signature, [each[:2] for each in inputs], opset, directory / "fp32.onnx")
    return Quantiser(directory / "fp32.onnx", inputs, directory, 8).prepared(smooth=False), inputs


@pytest.mark.parametrize(
    ("make", "opset", "products", "kind"),
    [
        pytest.param(make, opset, 3, kind, id=f"{name}, {kind}", marks=[] if kept else pytest.mark.prove)
        for name, make, opset in (("table", lambda path: write_table(path, "regression"), 20), ("images", images, 22))
        for kind in TYPES
        for kept in [name == "images" and kind == "fp16"]
    ],
)
def test_products_have_16_bits_and_inputs_and_outputs_what_they_had(
    make: Callable[[Path], PreparedData], opset: int, products: int, kind: Half, tmp_path: Path
) -> None:
    fp32, inputs = exported(tmp_path, make(tmp_path / "data"), opset)
    half = tmp_path / "half.onnx"
    write_half(fp32, half, kind)
    model, before = onnx.load(half), onnx.load(fp32)
    assert (model.graph.input, model.graph.output) == (before.graph.input, before.graph.output)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    found = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert len(found) == products and {types[node.input[1]] for node in found} == {TYPES[kind]}
    assert half.stat().st_size < 0.75 * fp32.stat().st_size
    scale = np.abs(onnx_predictor(fp32, 1)(inputs)).max()
    assert 0 < largest_output_error(half, fp32, inputs) < (0.002 if kind == "fp16" else 0.02) * scale
    if kind == "fp16":  # ONNX Runtime has no kernels for bfloat16 on CPUs
        difference = np.abs(onnx_predictor(half, 1)(inputs) - onnx_predictor(fp32, 1)(inputs)).max()
        assert 0 < difference < 0.002 * scale


def test_an_opset_without_convolutions_in_bf16_says_so(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w")
    source = graph([helper.make_node("Conv", ["x", "w"], ["y"])], [weights], ["batch", 1, 8, 8])
    onnx.save(source, tmp_path / "fp32.onnx")
    with refuses(UserError, match=r"export\.opset:"):
        write_half(tmp_path / "fp32.onnx", tmp_path / "half.onnx", "bf16")
    assert not (tmp_path / "half.onnx").exists()
    write_half(tmp_path / "fp32.onnx", tmp_path / "half.onnx", "fp16")


def graph(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], shape: list[str | int]) -> onnx.ModelProto:
    """A model of ``nodes`` from ``x`` to ``y``, both of ``shape`` or unknown."""
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *[None] * (len(shape) - 1)])],
        weights,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def residual(directory: Path, largest: float) -> Path:
    """x + relu(x w) v, whose first weight is ``largest``."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("MatMul", ["b", "v"], ["c"], name="second"),
        helper.make_node("Add", ["x", "c"], ["y"], name="sum"),
    ]
    weights = [np.eye(4, dtype=np.float32) for _ in range(2)]
    weights[0][0, 0] = largest
    stored = [numpy_helper.from_array(each, name) for each, name in zip(weights, ("w", "v"), strict=True)]
    onnx.save(graph(nodes, stored, ["batch", 4]), directory / "fp32.onnx")
    return directory / "fp32.onnx"


def inputs_by_name(path: Path) -> dict[str, list[str]]:
    return {node.name: list(node.input) for node in onnx.load(path).graph.node}


def test_a_residual_stays_in_fp32_and_what_lies_between_products_does_not(tmp_path: Path) -> None:
    write_half(residual(tmp_path, 1.0), tmp_path / "half.onnx", "fp16")
    reads = inputs_by_name(tmp_path / "half.onnx")
    assert reads["first"] == ["x.fp16", "w.fp16"] and reads["relu"] == ["a.fp16"] and reads["sum"] == ["x", "c"]


def test_weights_too_large_for_fp16_stay_in_fp32_and_overflow_is_found(tmp_path: Path) -> None:
    half, rows = tmp_path / "half.onnx", [np.full((4, 4), 100.0, np.float32)]
    write_half(residual(tmp_path, 1e5), half, "fp16")
    assert inputs_by_name(half)["first"] == ["x", "w"] and inputs_by_name(half)["second"][1] == "v.fp16"
    write_half(residual(tmp_path, 60_000.0), half, "fp16")
    with refuses(UserError, match=r"half\.onnx:"):
        largest_output_error(half, tmp_path / "fp32.onnx", rows)
    write_half(tmp_path / "fp32.onnx", half, "bf16")
    assert largest_output_error(half, tmp_path / "fp32.onnx", rows) < 0.01 * 6e6


def test_files_for_gpus_are_part_of_the_artifact_and_told_of(tmp_path: Path) -> None:
    data = images(tmp_path / "data")
    config = ExportConfig(seconds=0.3, half=True, tensorrt=True)
    artifact = engine.export(tmp_path / "out", cast(TrainedModel, trained_on(data, 40)), data, config, {})
    told = {each["name"]: each for each in artifact.read_json("export.json")["variants"]}
    assert told["fp16"]["verdict"] == told["tensorrt"]["verdict"] == "for GPUs"
    assert "at most" in told["fp16"]["reason"]
    # Opset 20 has no convolutions in BF16.
    assert told["bf16"]["verdict"] == "not made" and "weights stay in FP32: Conv" in told["bf16"]["reason"]
    assert "model.bf16.onnx" not in artifact.files
    for name in ("fp16", "tensorrt"):
        assert artifact.files[told[name]["file"]].size == told[name]["bytes"]
    check_package(tmp_path / "out")


@pytest.mark.prove
def test_a_provider_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_table(tmp_path / "data", "regression")
    config, trained = ExportConfig(provider="cuda"), cast(TrainedModel, trained_on(data, 1))
    with pytest.raises(UserError, match=r'^export\.provider: "cuda" .*CPUExecutionProvider'):
        engine.export(tmp_path / "out", trained, data, config, {})
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with refuses(UserError):
        engine.export(tmp_path / "again", trained, data, config, {})


def test_two_onnx_runtimes_over_each_other_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install onnxruntime-gpu`` overwrites onnxruntime: both install a module of the same name."""
    from slipstream.pipeline.export import session

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(session.PROVIDERS.values()))
    session.check_provider("cuda")
    monkeypatch.setattr(session, "installed_version", lambda name: "1.31.1")
    with refuses(UserError) as two:
        session.check_provider("cuda")
    assert "\n" not in two.value.message
    session.check_provider("cpu")


def test_on_a_gpu_fp32_is_not_tf32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would not agree with torch to the last digits that exporting asks for."""
    from slipstream.pipeline.export import session

    asked = []

    class Session:
        def __init__(self, path: Path, options: object, providers: list[tuple[str, dict[str, str]]]) -> None:
            asked.extend(providers)

        def get_providers(self) -> list[str]:
            return [name for name, _ in asked]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    session.session_on(tmp_path / "fp32.onnx", session.session_options(1), "cuda")
    assert asked == [("CUDAExecutionProvider", {"use_tf32": "0"})]


@pytest.mark.prove
def test_on_a_gpu_16_bits_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider's name stands for the CPU here, which computes FP16, and has no BF16: which is then said."""
    from slipstream.pipeline.export import session

    monkeypatch.setitem(session.PROVIDERS, "cuda", "CPUExecutionProvider")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    data = write_table(tmp_path / "data", "regression")
    config = ExportConfig(provider="cuda", seconds=10)
    trained = cast(TrainedModel, trained_on(data))
    report = engine.export(tmp_path / "out", trained, data, config, {}).read_json("export.json")
    verdicts = {each["name"]: each["verdict"] for each in report["variants"]}
    assert set(verdicts) - {"torch-bf16"} == {"torch-fp32", "onnx-fp32", "fp16", "bf16"}
    assert verdicts["bf16"] == "not made" and report["machine"]["gpu"] == "a GPU"
    assert report["profile"] == [] and report["machine"]["onnxruntime"] == onnxruntime.__version__
