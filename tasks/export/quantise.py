"""Static INT8 quantisation: unsigned activations, signed weights with a scale per channel, ranges by MinMax.

This combination (U8S8 QDQ) is fast on x86; with the defaults of ONNX Runtime's tool (S8S8) INT8 is slower there than
FP32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.export.convert import quiet, without_provenance
from tasks.export.session import default_threads
from tasks.export.smooth import smooth_first_product
from tasks.hardware.cpus import usable_cores

if TYPE_CHECKING:
    import onnx

CALIBRATION_BATCH = 50
PRODUCTS = ("MatMul", "Gemm")
BETWEEN_CONVOLUTIONS = ("Add", "Relu", "MaxPool", "Concat")


def convolutional(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "Conv" for node in model.graph.node)


def recipe(model: onnx.ModelProto) -> dict[str, Any]:
    """The operators to quantise, depending on the kind of network.

    In a convolutional network the operators between convolutions are quantised too, so that values stay in INT8.
    Normalisations are not: they run in FP32, and converting around each of them costs time (``benchmarks/export.py``
    compares with "int8-every-operator"). In a network of matrix products only the products are quantised and their
    outputs stay in FP32: a quarter of the error at the same speed.
    """
    if convolutional(model):
        return {"op_types_to_quantize": ["Conv", *PRODUCTS, *BETWEEN_CONVOLUTIONS]}
    return {
        "op_types_to_quantize": list(PRODUCTS),
        "extra_options": {"OpTypesToExcludeOutputQuantization": list(PRODUCTS)},
    }


def stacked_products(model: onnx.ModelProto) -> list[str]:
    """Names of the products with a stack of matrices. They stay in FP32: ONNX Runtime's integer kernel takes the scales
    of one matrix only ("b zero point is not valid")."""
    ranks = {weight.name: len(weight.dims) for weight in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return [node.name for node in products if any(ranks.get(name, 2) > 2 for name in node.input)]


def quantise(fp32: Path, int8: Path, inputs: Sequence[np.ndarray], *, reduce_range: bool) -> None:
    """Write the INT8 variant of the file ``fp32`` to ``int8``.

    ``inputs`` are calibration rows, in the order of the model's inputs. ``reduce_range`` keeps weights to 7 bits, which
    CPUs without VNNI need. Raises what ONNX Runtime's tool raises.
    """
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Rows(CalibrationDataReader):
        """Calibration rows, batch after batch."""

        def __init__(self, names: Sequence[str]) -> None:
            self.batches: Iterator[dict[str, np.ndarray]] = (
                {name: array[at : at + CALIBRATION_BATCH] for name, array in zip(names, inputs, strict=True)}
                for at in range(0, len(inputs[0]), CALIBRATION_BATCH)
            )

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    prepared = int8.with_suffix(".prepared.onnx")
    try:
        with quiet(), default_threads(usable_cores()):
            quant_pre_process(fp32, prepared)
            model = onnx.load(prepared)
            names = [value.name for value in model.graph.input]
            if not convolutional(model):
                smooth_first_product(model, dict(zip(names, inputs, strict=True)))
                onnx.save(model, prepared)
            quantize_static(
                prepared,
                int8,
                Rows(names),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=reduce_range,
                calibrate_method=CalibrationMethod.MinMax,
                nodes_to_exclude=stacked_products(model),
                **recipe(model),
            )
        onnx.save(without_provenance(onnx.load(int8)), int8)
    finally:
        prepared.unlink(missing_ok=True)
