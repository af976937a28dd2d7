"""Counts of the operations that torch dispatches, and of the bytes that they move: each is about one GPU kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.pipeline.train.memory.tracker import scratch_bytes

#: Operations that compute nothing, in addition to those that torch declares as views.
NOTHING = ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "device")
#: Operations that read or change only the elements that their index names.
INDEXED = ("gather", "scatter_add_")
#: Operations that do not read their first argument.
OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "full_like", "zeros_like", "ones_like")
CASTS = ("_to_copy",)
#: Kinds of operations by parts of their names; the first match counts.
KINDS = {
    "attention": "attention",
    "varlen_attn": "attention",
    "mm": "matmuls",
    "adamw": "optimizer",
    "_foreach_": "optimizer",
    "_to_copy": "cast",
}


class Counted(TorchDispatchMode):
    """Dispatch mode that counts operations (views excluded), casts, bytes, and those of the largest float32 result.

    An operation reads every tensor that it is given, and writes its results and what it changes in place. With an index
    it reads and writes only the elements that the index names. Deterministic attention writes and reads its scratch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.casts = self.moved = 0
        self.largest_float32 = 0
        #: Bytes by kind of operation.
        self.moved_by = dict.fromkeys((*KINDS.values(), "other"), 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in NOTHING:
            self.kernels += 1
            self.casts += name in CASTS
            moved = moved_bytes(function, args, kwargs or {}, made) + 2 * scratch_bytes(function, args, True)
            self.moved += moved
            self.moved_by[next((kind for part, kind in KINDS.items() if part in name), "other")] += moved
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and each.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, each.nbytes)
        return made


def moved_bytes(function: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the bytes that an operation reads and writes."""

    def size(values: Any) -> int:
        tensors = {id(each): each for each in tree_leaves(values) if isinstance(each, Tensor)}
        return sum(bytes_of(each) for each in tensors.values())

    name = function.overloadpacket.__name__
    if name in INDEXED:
        target, _, index, *source = args
        return size((index, source)) + 2 * index.numel() * target.itemsize
    arguments = function._schema.arguments
    changed = [arg for arg, known in zip(args, arguments, strict=False) if known.is_write]
    changed += [kwargs[known.name] for known in arguments if known.is_write and known.name in kwargs]
    read = args[1:] if name in OVERWRITES else args, [value for key, value in kwargs.items() if key != "out"]
    return size(read) + size(changed or made)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those that ``expand`` repeats count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size) * tensor.itemsize


def counted(work: Callable[[], object]) -> Counted:
    with Counted() as counts:
        work()
    return counts
