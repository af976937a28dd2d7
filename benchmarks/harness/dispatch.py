"""Counts of the operations that torch dispatches: each is about one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that compute nothing: views of the same memory.
VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "slice",
    "select",
    "detach",
    "alias",
)
CASTS = ("_to_copy",)


class Counted(TorchDispatchMode):
    """Dispatch mode that counts operations (views excluded), casts, and the bytes of the largest float32 result."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.casts = 0
        self.largest_float32 = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.kernels += 1
            self.casts += name in CASTS
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and each.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, each.nbytes)
        return made


def counted(work: Callable[[], object]) -> Counted:
    with Counted() as counts:
        work()
    return counts
