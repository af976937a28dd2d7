"""Detection of operations that would make the host wait for a device, on a CPU.

Torch's "meta" stands in for a device, and the CPU for the host. Copies from unpinned memory count, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STAND_IN = torch.device("meta")


class NumbersCopied(TorchFunctionMode):
    """Mode that raises if numbers of the host become a tensor; torch.full copies nothing and is allowed."""

    COPIES: tuple[Callable[..., Any], ...] = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.COPIES, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))


class NoWaits(TorchDispatchMode):
    """Mode that raises if the host would have to wait.

    It would if a number is read, if a shape depends on one, or for a copy between host and device. A number of the
    host may be an operand: it is passed with the kernel.
    """

    WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")
    COPIES = ("_to_copy", "copy_")

    def __init__(self) -> None:
        super().__init__()
        self._numbers = NumbersCopied()

    def __enter__(self) -> Self:
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{func} makes the host wait"
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
        if any(tensor.device == STAND_IN for tensor in tensors):
            host = [tensor for tensor in tensors if tensor.device != STAND_IN]
            assert not any(name in self.COPIES or tensor.ndim for tensor in host), f"{func} makes the host wait"
        return made
