"""How much memory a forward pass takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Bytes of results that a batch of an evaluation may have at once, and its most rows.
BATCH_BYTES = 256 * 2**20
MOST_ROWS = 1024


class ResultBytes(TorchDispatchMode):
    """Adds up the bytes of the results of all operations in its block, views apart: no forward pass takes more."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        run: Callable[..., Any] = func
        result = run(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def batch_rows(row_bytes: int) -> int:
    """The rows of an evaluation's batch for a model with so many bytes of results for each row. Does not depend on the
    machine, so that every machine computes the same."""
    return max(1, min(MOST_ROWS, BATCH_BYTES // max(1, row_bytes)))
