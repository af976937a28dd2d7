"""Quantised files made from one FP32 file, by recipes that share preparation and calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.pipeline.export.convert import exporters_silenced, without_provenance
from slipstream.pipeline.export.quantize.half_precision import write_half
from slipstream.pipeline.export.quantize.recipes import (
    BETWEEN_CONVOLUTIONS,
    CONVOLUTIONS,
    DYNAMIC,
    EMBEDDINGS,
    PRODUCTS,
    Recipe,
    has_convolutions,
    narrow_convolutions,
)
from slipstream.pipeline.export.session import default_threads
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import usable_cores

if TYPE_CHECKING:
    import onnx

CALIBRATION_BATCH = 50
#: Minimum calibration rows; ranges from fewer rows would clip later values.
FEWEST_ROWS = 16
#: Metadata key for the bits of the weights: 7 give the same numbers on every CPU, 8 need VNNI on x86.
WEIGHT_BITS = "slipstream.weight_bits"
INT4_BLOCK = 32


@dataclass(frozen=True)
class Quantiser:
    """Quantiser of the file ``fp32``; ``inputs`` are calibration rows in the order of the model's inputs.

    ``scratch`` is an empty directory that the recipes share. On x86 CPUs without VNNI, sums of 8-bit products overflow
    16 bits (onnxruntime#6004), unless weights have ``bits`` 7.
    """

    fp32: Path
    inputs: Sequence[np.ndarray]
    scratch: Path
    bits: int

    def prepared(self, smooth: bool) -> Path:
        """Return a file with inferred shapes and folded constants; ``smooth`` also smooths the first matmul."""
        import onnx
        from onnxruntime.quantization.shape_inference import quant_pre_process

        path = self.scratch / ("smooth.onnx" if smooth else "plain.onnx")
        if path.exists():
            return path
        with exporters_silenced(), default_threads(usable_cores()):
            if not smooth:
                quant_pre_process(self.fp32, path)
                onnx.save(with_factors_folded(onnx.load(path)), path)
                return path
            model = onnx.load(self.prepared(smooth=False))
            names = [value.name for value in model.graph.input]
            smooth_first_product(model, dict(zip(names, self.inputs, strict=True)))
            onnx.save(model, path)
        return path

    def make(self, recipe: Recipe, target: Path, fp32: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        """Write the recipe's file to ``target``; nodes in ``fp32``, or all but those in ``only``, stay in FP32.

        Raises the errors of ONNX Runtime's tool, and then removes ``target``.
        """
        import onnx

        prepared = self.prepared(recipe.smooth)
        makers = {"static": self._static, "dynamic": self._dynamic, "int4": self._int4}
        if recipe.kind in ("fp16", "bf16"):
            write_half(prepared, target, recipe.kind)
            return
        try:
            with exporters_silenced(), default_threads(usable_cores()):
                makers[recipe.kind](recipe, prepared, target, fp32, only)
            model = without_provenance(onnx.load(target))
            # Sessions infer the inner shapes themselves; they are some percent of a small file.
            model.graph.ClearField("value_info")
            onnx.helper.set_model_props(model, {WEIGHT_BITS: str(4 if recipe.kind == "int4" else self.bits)})
            onnx.save(model, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _static(self, recipe: Recipe, prepared: Path, target: Path, fp32: Sequence[str], only: Sequence[str]) -> None:
        import onnx
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        model = onnx.load(prepared)
        excluded = [*fp32, *(stacked_products(model) if recipe.per_channel else [])]
        excluded += narrow_convolutions(model) if recipe.wide else []
        options: dict[str, object] = {}
        if recipe.fp32_outputs:
            options["OpTypesToExcludeOutputQuantization"] = list(CONVOLUTIONS)
        quantize_static(
            prepared,
            target,
            calibration_rows([value.name for value in model.graph.input], self.inputs),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8 if recipe.activations == "s8" else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=recipe.per_channel,
            reduce_range=self.bits == 7,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=operator_types(recipe, model),
            nodes_to_quantize=list(only),
            nodes_to_exclude=excluded,
            extra_options=options,
            calibration_cache_path=self.scratch / f"{prepared.stem}-{recipe.operators}.json",
        )

    def _dynamic(self, recipe: Recipe, prepared: Path, target: Path, fp32: Sequence[str], only: Sequence[str]) -> None:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(
            prepared,
            target,
            op_types_to_quantize=[*DYNAMIC, *[EMBEDDINGS] * (recipe.operators == "all")],
            weight_type=QuantType.QInt8,
            reduce_range=self.bits == 7,
            nodes_to_quantize=list(only),
            nodes_to_exclude=[*stacked_products(onnx.load(prepared)), *fp32],
        )

    def _int4(self, recipe: Recipe, prepared: Path, target: Path, fp32: Sequence[str], only: Sequence[str]) -> None:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        # Embeddings are in INT8, because operators for INT4 ones need a later opset.
        quantize_dynamic(prepared, target, op_types_to_quantize=[EMBEDDINGS], weight_type=QuantType.QInt8)
        model = with_gemms_split(onnx.load(target))
        tool = MatMulNBitsQuantizer(model, block_size=INT4_BLOCK, is_symmetric=True, nodes_to_exclude=list(fp32))
        tool.process()
        tool.model.save_model_to_file(str(target), False)


def operator_types(recipe: Recipe, model: onnx.ModelProto) -> list[str]:
    """Return the operators that a static recipe quantises; empty for all that ONNX Runtime's tool supports."""
    if recipe.operators == "all":
        return []
    products = list(CONVOLUTIONS if has_convolutions(model) else PRODUCTS)
    return [*products, *BETWEEN_CONVOLUTIONS] if recipe.operators == "between" else products


def stacked_products(model: onnx.ModelProto) -> list[str]:
    """Return the names of batched matmuls.

    With a scale per channel they stay in FP32: ONNX Runtime's integer kernel accepts the scales of a single matrix only
    ("b zero point is not valid").
    """
    ranks = {weight.name: len(weight.dims) for weight in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return [node.name for node in products if any(ranks.get(name, 2) > 2 for name in node.input)]


def calibration_rows(names: Sequence[str], inputs: Sequence[np.ndarray]) -> Any:
    """Return a reader of calibration batches for ONNX Runtime's tool.

    Raises ``UserError`` for fewer than ``FEWEST_ROWS`` rows.
    """
    if len(inputs[0]) < FEWEST_ROWS:
        raise UserError(
            f"export.calibration_rows: the training split has {len(inputs[0])} rows for calibration; expected at "
            f"least {FEWEST_ROWS}"
        )
    from onnxruntime.quantization import CalibrationDataReader

    class Rows(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches: Iterator[dict[str, np.ndarray]] = (
                {name: array[at : at + CALIBRATION_BATCH] for name, array in zip(names, inputs, strict=True)}
                for at in range(0, len(inputs[0]), CALIBRATION_BATCH)
            )

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    return Rows()


def with_factors_folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Multiply the factors of ``Gemm`` into its weight and bias, in place.

    ONNX Runtime's static tool computes wrong sums for a factor of the bias, and the dynamic one skips the layer.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        factors = [each for each in node.attribute if node.op_type == "Gemm" and each.name in ("alpha", "beta")]
        for factor in factors:
            index = 1 if factor.name == "alpha" else 2
            name = node.input[index] if len(node.input) > index else ""
            if name in weights and factor.f != 1:
                array = numpy_helper.to_array(weights[name])
                node.input[index] = f"{node.output[0]}.{factor.name}"
                scaled = numpy_helper.from_array(array * array.dtype.type(factor.f), node.input[index])
                model.graph.initializer.append(scaled)
            if not name or name in weights:
                node.attribute.remove(factor)
    return model


def with_gemms_split(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace every ``Gemm`` with a weight by ``MatMul`` and ``Add``, in place; only those can have INT4 weights."""
    from onnx import helper, numpy_helper

    weights, nodes = {tensor.name: tensor for tensor in model.graph.initializer}, list[Any]()
    for node in model.graph.node:
        attributes = {each.name for each in node.attribute if each.f or each.i}
        if node.op_type != "Gemm" or node.input[1] not in weights or attributes - {"transB"}:
            nodes.append(node)
            continue
        read, bias = node.input[1], [name for name in node.input[2:] if name]
        if "transB" in attributes:
            read = f"{node.input[1]}.transposed"
            if read not in weights:
                transposed = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[1]]).T)
                weights[read] = numpy_helper.from_array(transposed, read)
                model.graph.initializer.append(weights[read])
        product = f"{node.output[0]}.product" if bias else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], read], [product], node.name))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], node.output, f"{node.name}.bias"))
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)
    return model


NAME = "smoothing"


def smooth_first_product(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """Scale the first matmul's input columns and weights to equal ranges, in place (SmoothQuant).

    ``feeds`` are calibration rows by input name.
    """
    from onnx import helper, numpy_helper

    uses = Counter(name for node in model.graph.node for name in node.input)
    # Weights with several uses cannot be changed for one of them.
    weights = {tensor.name: tensor for tensor in model.graph.initializer if uses[tensor.name] == 1}
    products = (node for node in model.graph.node if node.op_type in ("Gemm", "MatMul"))
    node = next((node for node in products if len(getattr(weights.get(node.input[1]), "dims", ())) == 2), None)
    if node is None:
        return
    tensor, read = weights[node.input[1]], node.input[0]
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    stored = numpy_helper.to_array(tensor)
    matrix = stored if transposed else stored.T  # [outputs, inputs]
    ranges = np.abs(values_of(model, read, feeds)).reshape(-1, matrix.shape[1]).max(axis=0), np.abs(matrix).max(axis=0)
    used = (ranges[0] > 0) & (ranges[1] > 0)
    scale = np.ones(matrix.shape[1], np.float32)
    scale[used] = np.sqrt(ranges[0][used] / ranges[1][used])
    matrix = matrix * scale
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(matrix if transposed else matrix.T), tensor.name))
    model.graph.initializer.append(numpy_helper.from_array(1 / scale, f"{NAME}.scale"))
    index = list(model.graph.node).index(node)
    model.graph.node.insert(index, helper.make_node("Mul", [read, f"{NAME}.scale"], [f"{NAME}.out"], name=NAME))
    node.input[0] = f"{NAME}.out"


def values_of(model: onnx.ModelProto, name: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Return the values of the graph's tensor ``name`` for the inputs ``feeds``."""
    import onnxruntime
    from onnx import ModelProto, helper

    probe = ModelProto()
    probe.CopyFrom(model)
    if name not in [value.name for value in probe.graph.output]:
        probe.graph.output.append(helper.make_empty_tensor_value_info(name))
    session = onnxruntime.InferenceSession(
        probe.SerializeToString(), onnxruntime.SessionOptions(), providers=["CPUExecutionProvider"]
    )
    return session.run([name], feeds)[0]
