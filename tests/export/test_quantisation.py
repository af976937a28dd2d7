"""INT8: calibrated on training rows only, quantised where it pays, without overflow on the CPU."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export.convert import to_onnx
from slipstream.pipeline.export.engine import check_symmetric, trtexec_command, write_tensorrt
from slipstream.pipeline.export.quantize import quantise as quantisation
from slipstream.pipeline.export.quantize.quantise import WEIGHT_BITS, Quantiser, smooth_first_product
from slipstream.pipeline.export.quantize.recipes import Recipe, narrow_convolutions, recipes_for
from slipstream.pipeline.export.quantize.search import matmul_names, rank_by_error
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.machine.description import this_machine
from slipstream.shared.models.predict import record_inputs
from tests.support.toys import images, trained_on
from tests.support.wording import refuses

OURS = Recipe("static", smooth=True)
IMAGES = Recipe("static", operators="between", fp32_outputs=False)


def quantise(
    fp32: Path, int8: Path, inputs: Sequence[np.ndarray], recipe: Recipe = OURS, bits: int = 8, **named: Any
) -> None:
    """One file by one recipe."""
    with TemporaryDirectory() as scratch:
        Quantiser(fp32, inputs, Path(scratch), bits).make(recipe, int8, **named)


def exported(directory: Path, data: PreparedData) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.fp32.onnx"
    example = record_inputs(data.signature, data.split("train")[:2])
    to_onnx(trained_on(data, steps=20).load(), data.signature, example, 20, path)
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return write_table(tmp_path_factory.mktemp("table") / "data", "classification")


@pytest.fixture(scope="module")
def table_fp32(tables: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("onnx"), tables)


@pytest.fixture(scope="module")
def image_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return images(tmp_path_factory.mktemp("image") / "data")


@pytest.fixture(scope="module")
def image_fp32(image_data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("onnx"), image_data)


@pytest.mark.prove
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
    rows = record_inputs(tables.signature, tables.split("train")[:60])
    quantise(table_fp32, tmp_path / "model.int8.onnx", rows)
    assert len(threads) >= 2 and set(threads) == {3}
    assert onnxruntime.SessionOptions().intra_op_num_threads == 0


@pytest.mark.prove
def test_a_network_of_products_keeps_its_outputs_in_fp32(
    tables: PreparedData, table_fp32: Path, tmp_path: Path
) -> None:
    int8 = tmp_path / "int8.onnx"
    quantise(table_fp32, int8, record_inputs(tables.signature, tables.split("train")))
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
    quantise(image_fp32, int8, record_inputs(image_data.signature, image_data.split("train")), IMAGES)
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


def test_weights_have_the_bits_that_were_asked_for(tables: PreparedData, table_fp32: Path, tmp_path: Path) -> None:
    largest = {}
    for bits in (7, 8):
        int8 = tmp_path / f"{bits}.onnx"
        quantise(table_fp32, int8, record_inputs(tables.signature, tables.split("train")), bits=bits)
        model = onnx.load(int8)
        arrays = [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
        largest[bits] = max(np.abs(a.astype(int)).max() for a in arrays if a.dtype == np.int8)
        assert {each.key: each.value for each in model.metadata_props} == {WEIGHT_BITS: str(bits)}
    assert largest == {8: 127, 7: 64}


def test_every_recipe_gives_a_file_that_runs_or_says_why(
    image_data: PreparedData, image_fp32: Path, tables: PreparedData, table_fp32: Path, tmp_path: Path
) -> None:
    for data, fp32 in ((image_data, image_fp32), (tables, table_fp32)):
        inputs, recipes = record_inputs(data.signature, data.split("train")[:100]), recipes_for(onnx.load(fp32))
        names = [recipe.code for recipe in recipes]
        assert len({recipe.name for recipe in recipes}) == len(recipes)
        assert len(set(names)) == len(names) and {"dynamic", "int4", "u8s8", "s8s8-tensor-all-out8"} <= {*names}
        scratch = tmp_path / fp32.parent.name / "scratch"
        scratch.mkdir(parents=True)
        expected = onnx_predictor(fp32, 1)(inputs)
        for recipe in recipes:
            target = scratch.parent / f"{recipe.code}.onnx"
            Quantiser(fp32, inputs, scratch, 7).make(recipe, target)
            found = onnx_predictor(target, 1)(inputs)
            assert found.shape == expected.shape and np.abs(found - expected).max() < np.ptp(expected), recipe.name


def test_narrow_convolutions_stay_in_fp32_where_asked(
    image_data: PreparedData, image_fp32: Path, table_fp32: Path, tmp_path: Path
) -> None:
    """The images are grey: the first of the two convolutions reads one channel, the other 16."""
    recipe = Recipe("static", operators="between", fp32_outputs=False, wide=True)
    assert recipe in recipes_for(onnx.load(image_fp32))
    assert not any(each.wide for each in recipes_for(onnx.load(table_fp32)))
    quantise(image_fp32, tmp_path / "int8.onnx", record_inputs(image_data.signature, image_data.split("train")), recipe)
    graph = onnx.load(tmp_path / "int8.onnx").graph
    dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert [node.input[1] in dequantised for node in graph.node if node.op_type == "Conv"] == [False, True]
    model = product_of("MatMul", np.ones((2, 3), np.float32))
    for channels, groups, narrow in ((1, 1, True), (4, 1, True), (5, 1, False), (1, 8, False)):
        convolution = onnx.helper.make_node("Conv", ["x", "w"], ["y"], name="convolution", group=groups)
        weights = numpy_helper.from_array(np.ones((8, channels, 3, 3), np.float32), "w")
        for part, content in (("node", [convolution]), ("initializer", [weights])):
            model.graph.ClearField(part)
            getattr(model.graph, part).extend(content)
        assert narrow_convolutions(model) == (["convolution"] if narrow else [])


def test_ranges_are_calibrated_once(
    tables: PreparedData, table_fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes that differ in types only share the ranges: the rows are run for the first of them."""
    read: list[Any] = []
    right = quantisation.calibration_rows

    def noted(names: Any, rows: Any) -> Any:
        read.append(right(names, rows))
        return read[-1]

    monkeypatch.setattr(quantisation, "calibration_rows", noted)
    quantiser = Quantiser(table_fp32, record_inputs(tables.signature, tables.split("train")), tmp_path, 7)
    for activations in ("u8", "s8"):
        quantiser.make(Recipe("static", activations), tmp_path / f"{activations}.onnx")
    assert [rows.get_next() is None for rows in read] == [True, False]


def test_layers_that_stay_in_fp32(tables: PreparedData, table_fp32: Path, tmp_path: Path) -> None:
    inputs = record_inputs(tables.signature, tables.split("train")[:200])
    quantiser = Quantiser(table_fp32, inputs, tmp_path, 7)
    layers = matmul_names(quantiser.prepared(smooth=False))
    errors = rank_by_error(quantiser, Recipe("static"), time.perf_counter() + 60)
    assert set(errors) == set(layers) and list(errors.values()) == sorted(errors.values(), reverse=True)
    assert rank_by_error(quantiser, Recipe("static"), 0.0) == {}
    quantiser.make(Recipe("static"), tmp_path / "kept.onnx", fp32=layers[:1])
    quantiser.make(Recipe("static"), tmp_path / "all.onnx")
    counts = [
        sum(node.op_type == "QuantizeLinear" for node in onnx.load(tmp_path / f"{name}.onnx").graph.node)
        for name in ("kept", "all")
    ]
    assert counts[0] < counts[1]


def test_the_file_for_tensorrt_is_symmetric(
    image_data: PreparedData, image_fp32: Path, tables: PreparedData, table_fp32: Path, tmp_path: Path
) -> None:
    for data, fp32 in ((image_data, image_fp32), (tables, table_fp32)):
        scratch, target = tmp_path / fp32.parent.name, tmp_path / "model.tensorrt.onnx"
        scratch.mkdir()
        inputs = record_inputs(data.signature, data.split("train")[:100])
        write_tensorrt(Quantiser(fp32, inputs, scratch, 8).prepared(smooth=False), target, inputs)
        found, expected = onnx_predictor(target, 1)(inputs), onnx_predictor(fp32, 1)(inputs)
        assert np.abs(found - expected).mean() < 0.05 * np.ptp(expected)
        model = onnx.load(target)
        assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) >= 2
        zero = next(tensor for tensor in model.graph.initializer if "zero_point" in tensor.name)
        zero.CopyFrom(numpy_helper.from_array(np.ones_like(numpy_helper.to_array(zero)), zero.name))
        with refuses(UserError, match=r"export\.tensorrt:"):
            check_symmetric(model)
    words = trtexec_command(tables.signature)
    assert "--minShapes=numeric:1x6,categorical:1x2 --optShapes=numeric:32x6" in words


def product_of(operator: str, weights: np.ndarray) -> onnx.ModelProto:
    """A graph of one product of ``x`` (``[batch, inputs]``) with ``weights`` (``[inputs, outputs]``)."""
    helper, transposed = onnx.helper, operator == "Gemm"
    stored = numpy_helper.from_array(np.ascontiguousarray(weights.T if transposed else weights), "w")
    attributes: dict[str, Any] = {"transB": 1} if transposed else {}
    node = helper.make_node(operator, ["x", "w"], ["y"], name="product", **attributes)
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in zip("xy", weights.shape, strict=True)
    ]
    graph = helper.make_graph([node], "graph", values[:1], values[1:], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("operator", ["Gemm", "MatMul"])
def test_a_column_with_a_long_tail_does_not_take_the_steps_of_the_others(operator: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 6)).astype(np.float32) * np.array([50, 1, 1, 0.1, 1, 0], np.float32)
    weights = (draw.normal(size=(6, 8)) / [[50], [1], [1], [0.1], [1], [1]]).astype(np.float32)
    fp32, errors = tmp_path / "fp32.onnx", {}
    onnx.save(product_of(operator, weights), fp32)
    for name in ("smooth", "rough"):
        int8 = tmp_path / f"{name}.onnx"
        quantise(fp32, int8, [x], OURS if name == "smooth" else Recipe("static"))
        errors[name] = np.abs(onnx_predictor(int8, 1)([x]) - x @ weights).mean()
    assert errors["smooth"] < errors["rough"] / 5, errors


def test_smoothing_changes_nothing_in_fp32(tables: PreparedData, table_fp32: Path, tmp_path: Path) -> None:
    model, inputs = onnx.load(table_fp32), record_inputs(tables.signature, tables.split("train"))
    smooth_first_product(model, dict(zip([value.name for value in model.graph.input], inputs, strict=True)))
    onnx.save(model, tmp_path / "smooth.onnx")
    onnx.checker.check_model(model)
    assert [node.name for node in model.graph.node].count("smoothing") == 1
    left, right = (onnx_predictor(path, 1)(inputs) for path in (table_fp32, tmp_path / "smooth.onnx"))
    np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


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
