"""Counts of the operations that torch dispatches, and of the bytes that they move: each is about one GPU kernel."""

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
    """Dispatch mode that counts operations (views excluded), casts, bytes, and those of the largest float32 result.

    An operation reads every tensor that it is given, and writes its results and what it changes in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.casts = self.moved = 0
        self.largest_float32 = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.kernels += 1
            self.casts += name in CASTS
            self.moved += moved_bytes(function, args, kwargs or {}, made)
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and each.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, each.nbytes)
        return made


def moved_bytes(function: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the bytes that an operation reads and writes."""

    def size(values: Any) -> int:
        return sum({id(each): each.nbytes for each in tree_leaves(values) if isinstance(each, Tensor)}.values())

    arguments = function._schema.arguments
    changed = [arg for arg, known in zip(args, arguments, strict=False) if known.is_write]
    changed += [kwargs[known.name] for known in arguments if known.is_write and known.name in kwargs]
    return size((args, kwargs)) + size(changed or made)


def counted(work: Callable[[], object]) -> Counted:
    with Counted() as counts:
        work()
    return counts
