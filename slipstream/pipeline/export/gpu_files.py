"""GPU model files in addition to the chosen one: checked on the CPU, and timed only on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, get_args

import numpy as np

from slipstream.pipeline.export.choose import GateResult
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import exporters_silenced, without_provenance
from slipstream.pipeline.export.quantize.half_precision import TRIED_ROWS, Half, largest_output_error, write_half
from slipstream.pipeline.export.quantize.quantise import Quantiser, calibration_rows, stacked_products
from slipstream.pipeline.export.quantize.recipes import CONVOLUTIONS
from slipstream.pipeline.export.quantize.search import calibration_inputs, creation_failure
from slipstream.pipeline.export.session import default_threads
from slipstream.pipeline.export.variants import left_out
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.export import VariantFigures
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import usable_cores

if TYPE_CHECKING:
    import onnx

FILE, COMMAND = "model.tensorrt.onnx", "model.tensorrt.txt"
#: Batch sizes in the TensorRT engine's optimisation profile.
SHAPES = (("min", 1), ("opt", 32), ("max", 256))


def write_tensorrt(prepared: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    """Quantise the file ``prepared`` for TensorRT, calibrated by ``inputs``.

    ``prepared`` comes from :meth:`.quantise_weight.Quantiser.prepared`. Raises ``UserError`` if a zero point is not 0,
    and the errors of ONNX Runtime's tool.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    model = onnx.load(prepared)
    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "AddQDQPairToWeight": True, "QuantizeBias": False}
    with exporters_silenced(), default_threads(usable_cores()):
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
    """Raise ``UserError`` unless every zero point is an int8 0, as TensorRT requires."""
    from onnx import numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            zero = stored.get(node.input[2])
            if zero is None or zero.dtype != np.int8 or np.any(zero):
                raise UserError(f"export.tensorrt: the zero point of {node.name} is not an int8 0, as TensorRT asks")


def trtexec_command(signature: Signature) -> str:
    """Return the command that builds a TensorRT engine on the target GPU."""

    def shapes(rows: int) -> str:
        return ",".join(f"{spec.name}:{'x'.join(map(str, (rows, *spec.shape)))}" for spec in signature.inputs)

    profile = " ".join(f"--{name}Shapes={shapes(rows)}" for name, rows in SHAPES)
    return f"trtexec --onnx={FILE} --int8 --fp16 {profile} --saveEngine=model.plan"


VERDICT = "for GPUs"


def gpu_files(writer: ArtifactWriter, fp32: Path, data: PreparedData, config: ExportConfig) -> list[VariantFigures]:
    """Write the GPU files that ``config`` requests, made from the file ``fp32``, and return their report entries.

    Raises ``UserError`` if the TensorRT file cannot be made.
    """
    if not (config.tensorrt or config.half):
        return []
    figures, inputs = list[VariantFigures](), calibration_inputs(data, config)
    with TemporaryDirectory(dir=writer.directory) as scratch:
        prepared = Quantiser(fp32, inputs, Path(scratch), 8).prepared(smooth=False)
        for kind in get_args(Half) if config.half else ():
            target = writer.directory / f"model.{kind}.onnx"
            try:
                write_half(prepared, target, kind)
                error = largest_output_error(target, prepared, inputs)
            except Exception as problem:
                target.unlink(missing_ok=True)
                figures.append(left_out(kind, creation_failure(problem)))
            else:
                reason = (
                    f"not timed on a CPU; by ONNX's reference implementation its outputs differ from FP32's by at most "
                    f"{error:.2g} on {min(TRIED_ROWS, len(inputs[0]))} rows"
                )
                figures.append(left_out(kind, GateResult(VERDICT, reason), target))
        if config.tensorrt:
            write_tensorrt(prepared, writer.directory / FILE, inputs)
            writer.write_bytes(COMMAND, f"{trtexec_command(data.signature)}\n".encode())
            reason = (
                f"not timed on a CPU; symmetric, all zero points 0; {COMMAND} has the command that builds its engine"
            )
            figures.append(left_out("tensorrt", GateResult(VERDICT, reason), writer.directory / FILE))
    return figures
