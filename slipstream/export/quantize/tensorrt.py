"""INT8 for TensorRT, which asks for symmetric quantisation: a file of its own, with the line that builds its engine.

TensorRT takes signed activations and weights, zero points of 0 and biases in FP32 (its developer guide, "Explicit
Quantization"). On CPUs this layout is slower than others, so the file is no candidate there and is not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.artifacts.prepared.data import Signature
from slipstream.errors import UserError
from slipstream.export.convert import quiet, without_provenance
from slipstream.export.quantize.quantise import calibration_rows, stacked_products
from slipstream.export.quantize.recipes import CONVOLUTIONS
from slipstream.export.session import default_threads
from slipstream.machine.limits import usable_cores

if TYPE_CHECKING:
    import onnx

FILE, COMMAND = "model.tensorrt.onnx", "model.tensorrt.txt"
#: The batch sizes that an engine is built for: the smallest, the usual and the largest.
SHAPES = (("min", 1), ("opt", 32), ("max", 256))


def write_tensorrt(prepared: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    """Quantise the file ``prepared`` (of :class:`.quantise.Quantiser`) for TensorRT; ``inputs`` calibrate it.

    Raises ``UserError`` if a zero point is not 0, and what ONNX Runtime's tool raises.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    model = onnx.load(prepared)
    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "AddQDQPairToWeight": True, "QuantizeBias": False}
    with quiet(), default_threads(usable_cores()):
        quantize_static(
            prepared,
            target,
            calibration_rows([value.name for value in model.graph.input], inputs),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=list(CONVOLUTIONS),
            nodes_to_exclude=stacked_products(model),
            extra_options={**options, "OpTypesToExcludeOutputQuantization": list(CONVOLUTIONS)},
        )
    plain = without_provenance(onnx.load(target))
    check_symmetric(plain)
    onnx.save(plain, target)


def check_symmetric(model: onnx.ModelProto) -> None:
    """Raise ``UserError`` unless every zero point is a stored int8 0."""
    from onnx import numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            zero = stored.get(node.input[2])
            if zero is None or zero.dtype != np.int8 or np.any(zero):
                raise UserError(f"export.tensorrt: the zero point of {node.name} is not an int8 0, as TensorRT asks")


def trtexec(signature: Signature) -> str:
    """The command that builds an engine of the file, on the GPU that it is to run on."""

    def shapes(rows: int) -> str:
        return ",".join(f"{spec.name}:{'x'.join(map(str, (rows, *spec.shape)))}" for spec in signature.inputs)

    profile = " ".join(f"--{name}Shapes={shapes(rows)}" for name, rows in SHAPES)
    return f"trtexec --onnx={FILE} --int8 --fp16 {profile} --saveEngine=model.plan"
