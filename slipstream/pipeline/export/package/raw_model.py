"""``model.raw.onnx``: raw columns to label and probabilities, in plain ONNX and ai.onnx.ml operators.

The graph applies :class:`slipstream.shared.source.columns.transform.Transform`, in float64 and the same order of
operations, then the model. Every raw column is an input ``[batch, 1]``: numbers and booleans as float64, NaN or a mark
of ``data.missing`` for missing, and texts already stripped of surrounding spaces. Times are texts in ISO 8601
(:mod:`slipstream.pipeline.export.package.raw_times`); before opset 20, float64 seconds since 1970 (UTC).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np
import onnx
from onnx import TensorProto, helper

from slipstream.pipeline.export.package.raw_columns import (
    FIRST,
    MISSING,
    UNSEEN,
    CategoryInput,
    NumericInput,
    RawColumns,
)
from slipstream.pipeline.export.package.raw_times import TEXT_OPSET, GraphBuilder, input_dtype, parse_times
from slipstream.shared.models.decision import log_odds
from slipstream.shared.source.columns.spelling import other_spellings
from slipstream.shared.source.columns.value_types import TIME

ML_DOMAIN, ML_OPSET = "ai.onnx.ml", 3
DAY = 86_400.0
#: As in Transform: outliers are clipped at ``FARTHEST`` standard deviations; ``LAST_SECOND`` is the last time whose
#: month is computed.
FARTHEST, LAST_SECOND = 1e4, 9e18
BATCH = "batch"


def raw_model(
    model: onnx.ModelProto, columns: RawColumns, classes: Sequence[str], threshold: float | None = None
) -> onnx.ModelProto:
    """Return ``model`` preceded by the encoding of raw columns.

    With ``classes`` the outputs are ``label`` (text, of two classes by ``threshold``) and ``probabilities`` (float32
    ``[batch, classes]``), otherwise ``value`` (``[batch, 1]``, of the type in ``model``). Inputs have the names and
    order of the columns; a number is appended to a name that is also an output.
    """
    inner = onnx.compose.add_prefix(model, "model/")
    outer = GraphBuilder(
        {value.name for value in inner.graph.input} | {o for node in inner.graph.node for o in node.output}
    )
    outer.taken |= {tensor.name for tensor in inner.graph.initializer}
    ends = [outer.name(end) for end in (("label", "probabilities") if classes else ("value",))]
    inputs = {column: outer.name(column) for column in columns.types}
    opset = next(each.version for each in inner.opset_import if each.domain in ("", "ai.onnx"))
    tensors = append_encoding(outer, columns, inputs, opset)
    for name, tensor in tensors.items():
        outer.add("Identity", tensor, named=f"model/{name}")
    before, outer.nodes = outer.nodes, []
    outputs = outer_ends(outer, inner.graph.output[0], classes, ends, threshold)
    graph = helper.make_graph(
        [*before, *inner.graph.node, *outer.nodes],
        "raw",
        [column_input(inputs[column], kind, opset) for column, kind in columns.types.items()],
        outputs,
        [*outer.constants, *inner.graph.initializer],
        value_info=inner.graph.value_info,
    )
    opsets = [*inner.opset_import, helper.make_opsetid(ML_DOMAIN, ML_OPSET)]
    whole = helper.make_model(graph, opset_imports=opsets, ir_version=inner.ir_version, functions=inner.functions)
    onnx.checker.check_model(whole)
    return whole


def encoding_model(columns: RawColumns, opset: int) -> onnx.ModelProto:
    """Return a model of the encoding only: from raw columns to the tensors ``numeric`` and ``categorical``."""
    graph = GraphBuilder({"numeric", "categorical"})
    inputs = {column: graph.name(column) for column in columns.types}
    tensors = append_encoding(graph, columns, inputs, opset)
    types = {"numeric": TensorProto.FLOAT, "categorical": TensorProto.INT32}
    outputs = []
    for name, tensor in tensors.items():
        graph.add("Identity", tensor, named=name)
        outputs.append(helper.make_tensor_value_info(name, types[name], [BATCH, None]))
    values = [column_input(inputs[column], kind, opset) for column, kind in columns.types.items()]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(ML_DOMAIN, ML_OPSET)]
    encoding = helper.make_graph(graph.nodes, "encode", values, outputs, graph.constants)
    return helper.make_model(encoding, opset_imports=opsets, ir_version=10)


def column_input(name: str, kind: str, opset: int) -> onnx.ValueInfoProto:
    dtype = TensorProto.STRING if input_dtype(kind, opset) == "string" else TensorProto.DOUBLE
    return helper.make_tensor_value_info(name, dtype, [BATCH, 1])


def outer_ends(
    graph: GraphBuilder,
    output: onnx.ValueInfoProto,
    classes: Sequence[str],
    ends: list[str],
    threshold: float | None,
) -> list[onnx.ValueInfoProto]:
    """Append nodes for label and probabilities, or the value, and return the graph outputs."""
    if not classes:
        graph.add("Identity", output.name, named=ends[0])
        return [helper.make_tensor_value_info(ends[0], output.type.tensor_type.elem_type, [BATCH, 1])]
    label, probabilities = ends
    deciding = output.name
    if threshold is not None:
        doubles = graph.add("Cast", output.name, to=TensorProto.DOUBLE)
        deciding = graph.add("Add", doubles, graph.constant([log_odds(threshold), 0.0]))
    best = graph.add("ArgMax", deciding, axis=1, keepdims=1)
    numbers, names = list(range(len(classes))), list(classes)
    graph.add("LabelEncoder", best, named=label, domain=ML_DOMAIN, keys_int64s=numbers, values_strings=names)
    graph.add("Softmax", output.name, named=probabilities, axis=1)
    return [
        helper.make_tensor_value_info(label, TensorProto.STRING, [BATCH, 1]),
        helper.make_tensor_value_info(probabilities, TensorProto.FLOAT, [BATCH, len(classes)]),
    ]


def append_encoding(graph: GraphBuilder, columns: RawColumns, inputs: dict[str, str], opset: int) -> dict[str, str]:
    """Append the encoding and return the names of ``numeric`` and ``categorical``, if any."""
    tensors = {}
    times = [name for name, kind in columns.types.items() if kind == TIME]
    if times and opset >= TEXT_OPSET:
        texts = graph.add("Concat", *(inputs[name] for name in times), axis=1)
        seconds = parse_times(graph, texts, len(times), columns.missing)
        parts = {name: graph.constant([place], np.int64) for place, name in enumerate(times)}
        inputs = inputs | {name: graph.add("Gather", seconds, part, axis=1) for name, part in parts.items()}
    if columns.numbers:
        tensors["numeric"] = encode_numbers(graph, columns, inputs)
    if columns.categories:
        codes = [encode_texts(graph, inputs[c.name], c, columns.missing) for c in columns.categories]
        joined = graph.add("Concat", *codes, axis=1)
        tensors["categorical"] = graph.add("Cast", joined, to=TensorProto.INT32)
    return tensors


def encode_texts(graph: GraphBuilder, texts: str, category: CategoryInput, missing: Sequence[str]) -> str:
    """Append the int64 codes of a text column; numbers and booleans may be spelled as pandas and Python do."""
    known = {text: FIRST + index for index, text in enumerate(category.vocabulary)}
    others = other_spellings(category.vocabulary, category.rule)
    codes = {**{other: known[text] for other, text in others.items()}, **dict.fromkeys(missing, MISSING), **known}
    # LabelEncoder needs at least one entry.
    codes = codes or {"": UNSEEN}
    names, numbers = list(codes), list(codes.values())
    return graph.add(
        "LabelEncoder", texts, domain=ML_DOMAIN, default_int64=UNSEEN, keys_strings=names, values_int64s=numbers
    )


def encode_numbers(graph: GraphBuilder, columns: RawColumns, inputs: dict[str, str]) -> str:
    """Append the float32 ``[batch, F]`` of all numeric inputs.

    Inputs with one function are computed together, so the number of nodes does not grow with F.
    """
    places = {name: index for index, name in enumerate(columns.numeric)}
    raw = graph.add("Concat", *(inputs[name] for name in columns.numeric), axis=1)
    for marks in zip_longest(*(columns.marks.get(name, []) for name in columns.numeric), fillvalue=np.nan):
        raw = graph.add("Where", graph.add("Equal", raw, graph.constant(marks)), graph.constant(np.nan), raw)

    def gather(tensor: str, wanted: Sequence[int], width: int) -> str:
        same = list(wanted) == list(range(width))
        return tensor if same else graph.add("Gather", tensor, graph.constant(wanted, np.int64), axis=1)

    alike: dict[Callable[..., str], list[int]] = {}
    for index, number in enumerate(columns.numbers):
        alike.setdefault(function_of(number), []).append(index)
    ordered = [index for group in alike.values() for index in group]
    numbers = [columns.numbers[index] for index in ordered]
    parts = []
    for function, group in alike.items():
        taken = [columns.numbers[index] for index in group]
        part = gather(raw, [places[number.name] for number in taken], len(places))
        parts.append(function(graph, part, taken))
    curved = graph.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    centred = graph.add("Sub", curved, graph.constant([number.mean for number in numbers]))
    scaled = graph.add("Div", centred, graph.constant([number.std for number in numbers]))
    # Clip's result for NaN is undefined, so NaN is replaced first.
    gaps = graph.add("IsNaN", scaled)
    present = graph.add("Where", gaps, graph.constant(0.0), scaled)
    cut = graph.add("Clip", present, graph.constant(-FARTHEST), graph.constant(FARTHEST))
    order = [ordered.index(index) for index in range(len(ordered))]
    encoded = gather(graph.add("Cast", cut, to=TensorProto.FLOAT), order, len(order))
    if not columns.indicators:
        return encoded
    marked = gather(raw, [places[name] for name in columns.indicators], len(places))
    gone = graph.add("Cast", graph.add("IsNaN", marked), to=TensorProto.FLOAT)
    return graph.add("Concat", encoded, gone, axis=1)


# Functions of a column: float64 ``[batch, columns]`` to the same shape


def function_of(number: NumericInput) -> Callable[..., str]:
    if number.curve == "log":
        return logarithm
    return {"": identity, "hour": hour, "weekday": weekday, "month": month}[number.part]


def identity(_: GraphBuilder, numbers: str, __: list[NumericInput]) -> str:
    return numbers


def logarithm(graph: GraphBuilder, numbers: str, taken: list[NumericInput]) -> str:
    size = graph.add("Div", graph.add("Abs", numbers), graph.constant([number.scale for number in taken]))
    bent = graph.add("Log", graph.add("Add", size, graph.constant(1.0)))
    return graph.add("Mul", graph.add("Sign", numbers), bent)


def modulo(graph: GraphBuilder, numbers: str, divisor: float) -> str:
    """Append the remainder with the sign of ``divisor``, as in NumPy, by correcting C's fmod."""
    by = graph.constant(divisor)
    rest = graph.add("Mod", numbers, by, fmod=1)
    negative = graph.add("Less", rest, graph.constant(0.0))
    return graph.add("Where", negative, graph.add("Add", rest, by), rest)


def hour(graph: GraphBuilder, seconds: str, _: list[NumericInput]) -> str:
    return graph.add("Div", modulo(graph, seconds, DAY), graph.constant(3600.0))


def weekday(graph: GraphBuilder, seconds: str, _: list[NumericInput]) -> str:
    days = graph.add("Floor", graph.add("Div", seconds, graph.constant(DAY)))
    return modulo(graph, graph.add("Add", days, graph.constant(3.0)), 7.0)


def month(graph: GraphBuilder, seconds: str, _: list[NumericInput]) -> str:
    """Append the month, 0 for January, in integer arithmetic.

    Uses H. Hinnant's ``civil_from_days``, in which a year starts in March.
    """

    def whole(value: int) -> str:
        return graph.constant(value, np.int64)

    def floor_divide(number: str, divisor: int) -> str:
        rest = graph.add("Mod", number, whole(divisor))
        return graph.add("Div", graph.add("Sub", number, rest), whole(divisor))

    gaps = graph.add("IsNaN", seconds)
    present = graph.add("Where", gaps, graph.constant(0.0), seconds)
    cut = graph.add("Clip", present, graph.constant(-LAST_SECOND), graph.constant(LAST_SECOND))
    days = floor_divide(graph.add("Cast", cut, to=TensorProto.INT64), 86_400)
    since_march = graph.add("Add", days, whole(719_468))
    day = graph.add("Mod", since_march, whole(146_097))  # of 400 years
    leaps = [floor_divide(day, length) for length in (1460, 36_524, 146_096)]
    without = graph.add("Sub", graph.add("Add", graph.add("Sub", day, leaps[0]), leaps[1]), leaps[2])
    year = floor_divide(without, 365)
    before = graph.add(
        "Sub",
        graph.add("Add", graph.add("Mul", year, whole(365)), floor_divide(year, 4)),
        floor_divide(year, 100),
    )
    in_year = graph.add("Sub", day, before)
    of_march = floor_divide(graph.add("Add", graph.add("Mul", in_year, whole(5)), whole(2)), 153)
    number = graph.add("Mod", graph.add("Add", of_march, whole(2)), whole(12))
    return graph.add("Where", gaps, graph.constant(np.nan), graph.add("Cast", number, to=TensorProto.DOUBLE))
