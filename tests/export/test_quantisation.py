"""INT8: calibrated on training rows only, quantised where it pays, within the range that the CPU can sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from tasks.artifacts.prepared import PreparedData
from tasks.export import quantise as quantisation
from tasks.export.config import ExportConfig
from tasks.export.convert import to_onnx
from tasks.export.quantise import quantise, recipe
from tasks.export.smooth import smooth_first_product
from tasks.export.variants import int8_variant, onnx_predictor
from tasks.hardware.machine import Machine, this_machine
from tasks.models.predict import inputs_of
from tests.support.toys import images, table, trained_on, write_prepared

VNNI = Machine("a CPU", "x86_64", ("avx2", "avx512_vnni"))


def exported(directory: Path, data: PreparedData) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.fp32.onnx"
    example = inputs_of(data.signature, data.split("train")[:2])
    to_onnx(trained_on(data, steps=20).load(), data.signature, example, 20, path)
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return table(tmp_path_factory.mktemp("table") / "data", "classification")


@pytest.fixture(scope="module")
def table_fp32(tables: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("onnx"), tables)


@pytest.fixture(scope="module")
def image_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return images(tmp_path_factory.mktemp("image") / "data")


@pytest.fixture(scope="module")
def image_fp32(image_data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("onnx"), image_data)


def with_changed(data: PreparedData, directory: Path, split: str) -> PreparedData:
    """The same data, one split's numbers a thousand times as large."""
    splits = {name: np.array(data.split(name)) for name in ("train", "validation", "test")}
    splits[split]["numeric"] *= 1000
    return write_prepared(directory, data.signature, splits)


def test_only_training_rows_calibrate(tables: PreparedData, table_fp32: Path, tmp_path: Path) -> None:
    """Outliers in the other splits change no byte of the INT8 model; outliers in the training split do."""
    models = {}
    for split in ("test", "validation", "train", "none"):
        data = tables if split == "none" else with_changed(tables, tmp_path / split / "data", split)
        directory = tmp_path / split / "out"
        directory.mkdir(parents=True)
        (directory / "model.fp32.onnx").write_bytes(table_fp32.read_bytes())
        int8_variant(directory, data, ExportConfig(), VNNI)
        models[split] = (directory / "model.int8.onnx").read_bytes()
    assert models["none"] == models["test"] == models["validation"]
    assert models["none"] != models["train"]


def test_sessions_take_the_cores_of_the_pod_and_not_those_of_the_node(
    tables: PreparedData, table_fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that ONNX Runtime's tool makes for the calibration."""
    threads = []

    class Noted(onnxruntime.InferenceSession):
        def __init__(self, model: object, sess_options: object = None, **others: object) -> None:
            threads.append(getattr(sess_options, "intra_op_num_threads", 0))
            super().__init__(model, sess_options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Noted)
    monkeypatch.setattr(quantisation, "usable_cores", lambda: 3)
    rows = inputs_of(tables.signature, tables.split("train")[:60])
    quantise(table_fp32, tmp_path / "model.int8.onnx", rows, reduce_range=False)
    assert len(threads) >= 2 and set(threads) == {3}
    assert onnxruntime.SessionOptions().intra_op_num_threads == 0


def test_a_network_of_products_keeps_its_outputs_in_fp32(
    tables: PreparedData, table_fp32: Path, tmp_path: Path
) -> None:
    int8 = tmp_path / "int8.onnx"
    quantise(table_fp32, int8, inputs_of(tables.signature, tables.split("train")), reduce_range=False)
    graph = onnx.load(int8).graph
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    quantised = {name for node in graph.node if node.op_type == "QuantizeLinear" for name in node.input}
    assert len(products) == 3
    assert {node.output[0] for node in products}.isdisjoint(quantised)
    assert graph.output[0].name == products[-1].output[0]


def test_weights_are_signed_per_channel_and_activations_unsigned(
    image_data: PreparedData, image_fp32: Path, tmp_path: Path
) -> None:
    int8 = tmp_path / "int8.onnx"
    quantise(image_fp32, int8, inputs_of(image_data.signature, image_data.split("train")), reduce_range=False)
    graph = onnx.load(int8).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    produced = {node.output[0]: node for node in graph.node}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 2
    for node in convolutions:
        activation, weight = (produced[name] for name in node.input[:2])
        assert arrays[activation.input[2]].dtype == np.uint8
        assert arrays[weight.input[0]].dtype == np.int8
        assert arrays[weight.input[1]].shape == (16,)


def test_without_vnni_weights_keep_to_seven_bits(tables: PreparedData, table_fp32: Path, tmp_path: Path) -> None:
    largest = {}
    for machine in (VNNI, Machine("an old CPU", "x86_64", ("avx2",))):
        int8 = tmp_path / f"{machine.cpu}.onnx"
        inputs = inputs_of(tables.signature, tables.split("train"))
        quantise(table_fp32, int8, inputs, reduce_range=machine.saturates)
        arrays = [numpy_helper.to_array(tensor) for tensor in onnx.load(int8).graph.initializer]
        largest[machine.saturates] = max(np.abs(a.astype(int)).max() for a in arrays if a.dtype == np.int8)
    assert largest == {False: 127, True: 64}


def product_of(operator: str, weights: np.ndarray) -> onnx.ModelProto:
    """A graph of one product of ``x`` (``[batch, inputs]``) with ``weights`` (``[inputs, outputs]``)."""
    helper, transposed = onnx.helper, operator == "Gemm"
    stored = numpy_helper.from_array(np.ascontiguousarray(weights.T if transposed else weights), "w")
    node = helper.make_node(operator, ["x", "w"], ["y"], name="product", **({"transB": 1} if transposed else {}))
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in zip("xy", weights.shape, strict=True)
    ]
    graph = helper.make_graph([node], "graph", values[:1], values[1:], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("operator", ["Gemm", "MatMul"])
def test_a_column_with_a_long_tail_does_not_take_the_steps_of_the_others(
    operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 6)).astype(np.float32) * np.float32([50, 1, 1, 0.1, 1, 0])
    weights = (draw.normal(size=(6, 8)) / [[50], [1], [1], [0.1], [1], [1]]).astype(np.float32)
    fp32, errors = tmp_path / "fp32.onnx", {}
    onnx.save(product_of(operator, weights), fp32)
    for name in ("smooth", "rough"):
        int8 = tmp_path / f"{name}.onnx"
        quantise(fp32, int8, [x], reduce_range=False)
        errors[name] = np.abs(onnx_predictor(int8, 1)([x]) - x @ weights).mean()
        monkeypatch.setattr("tasks.export.quantise.smooth_first_product", lambda *_: None)
    assert errors["smooth"] < errors["rough"] / 5, errors


def test_smoothing_changes_nothing_in_fp32(tables: PreparedData, table_fp32: Path, tmp_path: Path) -> None:
    model, inputs = onnx.load(table_fp32), inputs_of(tables.signature, tables.split("train"))
    smooth_first_product(model, dict(zip([value.name for value in model.graph.input], inputs, strict=True)))
    onnx.save(model, tmp_path / "smooth.onnx")
    onnx.checker.check_model(model)
    assert [node.name for node in model.graph.node].count("smoothing") == 1
    left, right = (onnx_predictor(path, 1)(inputs) for path in (table_fp32, tmp_path / "smooth.onnx"))
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def graph_of(*operators: str) -> onnx.ModelProto:
    nodes = [onnx.helper.make_node(operator, ["x"], ["x"]) for operator in operators]
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [], []))


def test_the_recipe_follows_the_graph() -> None:
    convolutional = recipe(graph_of("Conv", "InstanceNormalization", "Relu", "Gemm"))
    assert {"Conv", "Gemm", "Relu"} <= set(convolutional["op_types_to_quantize"])
    assert "InstanceNormalization" not in convolutional["op_types_to_quantize"]
    assert recipe(graph_of("Gather", "Gemm"))["op_types_to_quantize"] == ["MatMul", "Gemm"]


@pytest.mark.parametrize(
    ("architecture", "flags", "saturates"),
    [
        ("x86_64", "fpu avx2 avx512f avx512_vnni", False),
        ("x86_64", "fpu avx2 avx_vnni", False),
        ("x86_64", "fpu avx2 avx512f", True),
        ("aarch64", "fp asimd asimddp", False),
    ],
)
def test_the_instruction_set_is_read(
    architecture: str, flags: str, saturates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: architecture)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    machine = this_machine(cpuinfo)
    assert (machine.cpu, machine.saturates) == ("A CPU", saturates)
    assert set(machine.flags) <= set(flags.split())
    assert machine.flags
