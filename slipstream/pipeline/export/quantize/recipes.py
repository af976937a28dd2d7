"""Quantisation recipes; none is best on every CPU, network and batch size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx

PRODUCTS = ("MatMul", "Gemm")
CONVOLUTIONS = ("Conv", "ConvTranspose", *PRODUCTS)
#: Operators of dynamic recipes: their convolutions in INT8 are several times slower than in FP32.
DYNAMIC = (*PRODUCTS, "LSTM")
EMBEDDINGS = "Gather"
#: Fraction of the file's bytes from which embeddings get a dynamic recipe of their own.
LARGE = 0.1
BETWEEN_CONVOLUTIONS = ("Add", "Relu", "MaxPool", "Concat")
#: Maximum input channels of a "narrow" convolution. ONNX Runtime's integer kernel gathers its input one by one, more
#: slowly than FP32 computes it: 780 instead of 115 µs for 32 grey images of 32 x 32.
NARROW = 4

Operators = Literal["products", "between", "all"]


@dataclass(frozen=True)
class Recipe:
    """Quantisation recipe; static ones have signed weights and MinMax ranges from the calibration rows."""

    kind: Literal["static", "dynamic", "int4", "fp16", "bf16"]
    #: For static recipes: "u8" or "s8" activations, and a weight scale per channel or per tensor.
    activations: Literal["u8", "s8"] = "u8"
    per_channel: bool = True
    #: "products": only matmuls and convolutions; "between": also the operators between convolutions, so that values
    #: stay in INT8; "all": every operator; for dynamic recipes: also embeddings.
    operators: Operators = "products"
    #: If True, matmul outputs stay in FP32 and are not rounded to INT8.
    fp32_outputs: bool = True
    #: If True, the ranges of the first matmul's inputs are equalised (``smooth_first_product``).
    smooth: bool = False
    #: If True, narrow convolutions, such as an image's first, stay in FP32.
    wide: bool = False

    @property
    def name(self) -> str:
        """Name in words, such as "int8 static, per tensor" or "fp16"; defaults are omitted."""
        if self.kind not in ("static", "dynamic"):
            return self.kind
        words = {
            "signed": self.activations == "s8",
            "per tensor": not self.per_channel,
            "between convolutions": self.operators == "between",
            "all operators": self.operators == "all",
            "int8 outputs": not self.fp32_outputs,
            "smoothed": self.smooth,
            "wide layers": self.wide,
        }
        return ", ".join([f"int8 {self.kind}", *(word for word, holds in words.items() if holds)])

    @property
    def code(self) -> str:
        """Name for files, such as ``u8s8``, ``s8s8-tensor-all-out8``, ``u8s8-smooth``, ``dynamic``."""
        types = f"{self.activations}s8" if self.kind == "static" else self.kind
        parts = [types, *["tensor"] * (not self.per_channel)]
        parts += [self.operators] * (self.operators != "products")
        parts += ["out8"] * (not self.fp32_outputs) + ["smooth"] * self.smooth + ["wide"] * self.wide
        return "-".join(parts)


def narrow_convolutions(model: onnx.ModelProto) -> list[str]:
    """Return the names of ungrouped convolutions with at most ``NARROW`` input channels."""
    channels = {weight.name: weight.dims[1] for weight in model.graph.initializer if len(weight.dims) > 2}
    names = []
    for node in model.graph.node:
        grouped = any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute)
        if node.op_type == "Conv" and not grouped and channels.get(node.input[1], NARROW + 1) <= NARROW:
            names.append(node.name)
    return names


def has_convolutions(model: onnx.ModelProto) -> bool:
    return any(node.op_type in CONVOLUTIONS and node.op_type not in PRODUCTS for node in model.graph.node)


def fp32_shares(model: onnx.ModelProto) -> dict[str, float]:
    """Return the fraction of the file that FP32 weights take, by the operator that reads them, largest first."""
    from onnx import TensorProto

    weights = {each.name: each.ByteSize() for each in model.graph.initializer if each.data_type == TensorProto.FLOAT}
    taken, size = Counter[str](), model.ByteSize()
    for node in model.graph.node:
        taken[node.op_type] += sum(weights.pop(name, 0) for name in node.input)
    return {operator: count / size for operator, count in taken.most_common()}


#: Recipes for GPUs, where ONNX Runtime's kernels compute in 16 bits; its INT8 kernels are for CPUs.
FOR_GPUS = [Recipe("fp16"), Recipe("bf16")]


def recipes_for(model: onnx.ModelProto, smallest_first: bool = False) -> list[Recipe]:
    """Return all CPU recipes for a model, the most promising first, since the time may end early.

    The order follows the measurements of ``benchmarks/export.py``. ``smallest_first`` starts with INT4.
    """
    if has_convolutions(model):
        scopes: tuple[Operators, ...] = ("between", "all", "products")
        first = [
            Recipe("static", per_channel=per_channel, operators=operators, fp32_outputs=False, wide=True)
            for per_channel, operators in product((True, False), scopes)
            if narrow_convolutions(model)
        ]
        first += [
            Recipe("static", operators="between", fp32_outputs=False),
            Recipe("static", operators="all", fp32_outputs=False),
            Recipe("static", operators="products", fp32_outputs=False),
            Recipe("static", per_channel=False, operators="all", fp32_outputs=False),
            Recipe("static", "s8", per_channel=False, operators="all", fp32_outputs=False),
        ]
    else:
        first = [
            Recipe("static", smooth=True),
            Recipe("dynamic"),
            Recipe("static", "s8", per_channel=False, operators="all", fp32_outputs=False),
            Recipe("static"),
            Recipe("static", per_channel=False, operators="all", fp32_outputs=False),
            Recipe("static", per_channel=False, operators="products"),
        ]
        scopes = ("products", "all")
    types: tuple[Literal["u8", "s8"], ...] = ("u8", "s8")
    grid = [
        Recipe("static", activations, per_channel, operators, fp32_outputs)
        for operators, per_channel, fp32_outputs, activations in product(scopes, (True, False), (False, True), types)
    ]
    dynamic = [Recipe("dynamic")]
    if fp32_shares(model).get(EMBEDDINGS, 0.0) >= LARGE:
        dynamic.append(Recipe("dynamic", operators="all"))
    recipes = list(dict.fromkeys([*first, *dynamic, *grid, Recipe("int4")]))
    return sorted(recipes, key=lambda recipe: recipe.kind != "int4") if smallest_first else recipes
