"""FP16 and BF16 files for GPUs: matmuls, convolutions, embeddings and the operators between them in 16 bits.

As in torch's autocast, other operators stay in FP32: in sums, normalisations and exponentials, 16 bits lose digits or
overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slipstream.pipeline.export.convert import largest_difference, model_opset
from slipstream.pipeline.export.quantize.recipes import CONVOLUTIONS, EMBEDDINGS
from slipstream.shared.errors import UserError

if TYPE_CHECKING:
    import onnx

Half = Literal["fp16", "bf16"]
#: Operators that run in 16 bits without further loss if their inputs are 16-bit results already.
PASSING = ("Relu", "MaxPool", "Add", "Concat", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity")
LARGEST_FP16 = 65504.0
#: Number of rows for ONNX's reference implementation, which is slow but supports every type on any machine.
TRIED_ROWS = 4


def write_half(prepared: Path, target: Path, kind: Half) -> None:
    """Write the file ``prepared`` with matmuls in ``kind`` to ``target``.

    ``prepared`` comes from :meth:`.quantise_weight.Quantiser.prepared`. Raises ``UserError`` if the opset has no matmul
    of that type.
    """
    import onnx

    converted = HalfPrecisionConverter(onnx.load(prepared), kind).model()
    onnx.checker.check_model(converted, full_check=True)
    onnx.save(converted, target)


def largest_output_error(path: Path, fp32: Path, inputs: Sequence[np.ndarray]) -> float:
    """Return the largest absolute difference between the outputs of ``path`` and ``fp32``.

    Uses the first ``TRIED_ROWS`` rows of ``inputs``. Raises ``UserError`` if an output is not finite.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    results = []
    for file in (fp32, path):
        model = onnx.load(file)
        feed = {value.name: rows[:TRIED_ROWS] for value, rows in zip(model.graph.input, inputs, strict=True)}
        with np.errstate(all="ignore"):
            outputs: Any = ReferenceEvaluator(model).run(None, feed)
        results.append(outputs[0])
    if not np.isfinite(results[1]).all():
        raise UserError(f"{path.name}: an output is not finite: the numbers are too large for 16 bits")
    return largest_difference(*results)


class HalfPrecisionConverter:
    """Converter of one model; casts join the FP32 and 16-bit names of the same value."""

    def __init__(self, source: onnx.ModelProto, kind: Half) -> None:
        from onnx import TensorProto, shape_inference

        self.source, self.kind = shape_inference.infer_shapes(source), kind
        self.type = TensorProto.FLOAT16 if kind == "fp16" else TensorProto.BFLOAT16
        graph = self.source.graph
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        values = (*graph.input, *graph.output, *graph.value_info)
        self.floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
        self.floats |= {name for name, tensor in self.weights.items() if tensor.data_type == TensorProto.FLOAT}
        #: 16-bit names by FP32 name; values computed in 16 bits; those of them that have no FP32 form yet.
        self.halves: dict[str, str] = {}
        self.computed: set[str] = set()
        self.only_half: set[str] = set()

    def model(self) -> onnx.ModelProto:
        import onnx

        graph = self.source.graph
        nodes = [converted for node in graph.node for converted in self.converted(node)]
        if not any(node.op_type in CONVOLUTIONS and node.output[0] in self.halves.values() for node in nodes):
            opset = model_opset(self.source)
            raise UserError(f"export.opset: {opset} has no matmul of this model in {self.kind}; set it to 22 or more")
        for value in graph.output:
            nodes += self.cast(value.name) if value.name in self.only_half else []
        converted = onnx.ModelProto()
        converted.CopyFrom(self.source)
        for part, content in (("node", nodes), ("value_info", [])):
            converted.graph.ClearField(part)
            getattr(converted.graph, part).extend(content)
        used = {name for node in nodes for name in (*node.input, *captured(node))}
        initializers = [*graph.initializer, *(self.stored(name) for name in self.halves if name in self.weights)]
        converted.graph.ClearField("initializer")
        converted.graph.initializer.extend(tensor for tensor in initializers if tensor.name in used)
        return converted

    def converted(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield the casts that a node needs, then the converted node."""
        import onnx

        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if not self.in_half(node):
            for name in dict.fromkeys([*node.input, *captured(node)]):
                yield from self.cast(name) if name in self.only_half else ()
            yield copy
            return
        for index, name in enumerate(node.input):
            if name in self.floats:
                if name not in self.halves and name not in self.weights:
                    yield self.cast_node(name, f"{name}.{self.kind}", self.type)
                copy.input[index] = self.halves.setdefault(name, f"{name}.{self.kind}")
        for index, name in enumerate(node.output):
            if name in self.floats:
                copy.output[index] = self.halves[name] = f"{name}.{self.kind}"
                self.computed.add(name)
                self.only_half.add(name)
        yield copy

    def in_half(self, node: onnx.NodeProto) -> bool:
        read = [name for name in node.input if name in self.floats]
        if node.domain or not read or not self.allowed(node.op_type) or not {*node.output} <= self.floats:
            return False
        if not all(self.fits(name) for name in read):
            return False
        if node.op_type in CONVOLUTIONS or (node.op_type == EMBEDDINGS and {*read} <= {*self.weights}):
            return True
        values = {*read} - {*self.weights}
        return node.op_type in PASSING and bool(values) and values <= self.computed

    def allowed(self, operator: str) -> bool:
        """Return True if this operator exists in the opset for the 16-bit type."""
        from onnx import defs

        schema = defs.get_schema(operator, model_opset(self.source))
        types = {each.type_param_str: each.allowed_type_strs for each in schema.type_constraints}
        name = "tensor(float16)" if self.kind == "fp16" else "tensor(bfloat16)"
        return bool(schema.inputs) and name in types.get(schema.inputs[0].type_str, ())

    def fits(self, name: str) -> bool:
        from onnx import numpy_helper

        if self.kind == "bf16" or name not in self.weights:
            return True
        return bool(np.abs(numpy_helper.to_array(self.weights[name])).max(initial=0) < LARGEST_FP16)

    def stored(self, name: str) -> onnx.TensorProto:
        """Return a weight in the 16-bit type."""
        from onnx import helper, numpy_helper

        values = numpy_helper.to_array(self.weights[name])
        return numpy_helper.from_array(values.astype(helper.tensor_dtype_to_np_dtype(self.type)), self.halves[name])

    def cast(self, name: str) -> Iterator[onnx.NodeProto]:
        """Yield a cast to FP32 for a value that so far exists only in 16 bits."""
        from onnx import TensorProto

        self.only_half.discard(name)
        yield self.cast_node(self.halves[name], name, TensorProto.FLOAT)

    def cast_node(self, read: str, name: str, kind: int) -> onnx.NodeProto:
        from onnx import helper

        return helper.make_node("Cast", [read], [name], f"{name}.cast", to=kind)


def captured(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that subgraphs of the node read."""
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from inner.input
            yield from captured(inner)
