"""ONNX graph under construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper


@dataclass
class GraphBuilder:
    """ONNX graph under construction; ``taken`` are the names in use."""

    taken: set[str]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def name(self, wanted: str) -> str:
        """Return ``wanted``, with a number appended if it is in use."""
        name, number = wanted, 2
        while name in self.taken or not name:
            name, number = f"{wanted}_{number}", number + 1
        self.taken.add(name)
        return name

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.float64) -> str:
        name = self.name("encode/constant")
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(self, operator: str, *inputs: str, named: str = "", domain: str = "", **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        output = named or self.name(f"encode/{operator.lower()}")
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, domain=domain, **attributes))
        return output
