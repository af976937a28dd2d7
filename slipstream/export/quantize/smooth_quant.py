"""SmoothQuant: equalise the ranges of a product's inputs before quantisation.

All inputs of a product share one 8-bit scale. If they are columns of a table, embeddings and periodic features side by
side, the column with the largest range determines the scale, and few steps are left for the others. Therefore each
input column is divided by ``sqrt(max|x| / max|w|)`` and its weights are multiplied by the same factor, which changes
nothing in FP32 (Xiao et al., "SmoothQuant", ICML 2023, with the usual exponent of one half).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

NAME = "smoothing"


def smooth_first_product(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """Insert a multiplication before the first product with a weight matrix, if ``model`` has one; changes it in place.

    ``feeds`` are calibration rows by the names of the model's inputs.
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
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place, helper.make_node("Mul", [read, f"{NAME}.scale"], [f"{NAME}.out"], name=NAME))
    node.input[0] = f"{NAME}.out"


def values_of(model: onnx.ModelProto, name: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The values of the graph's tensor ``name`` for the inputs ``feeds``."""
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
