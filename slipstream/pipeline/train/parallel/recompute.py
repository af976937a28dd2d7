"""Activation checkpointing: the backward pass recomputes every block from its inputs.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Random numbers are replayed, so gradients are
bitwise equal; the cost is another forward pass. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.shared.errors import UserError
from slipstream.shared.models.plan import block_names


class RecomputedForward:
    """Replacement for a block's ``forward`` that recomputes it in the backward pass, if any."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        #: Function to run and to recompute; compiling the block replaces this function.
        self.forward: Callable[..., Any] = block.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        return checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Return the contexts of first run and recomputation, which must not update batch statistics again."""
        return nullcontext(), buffers_unchanged(self._block)


@contextmanager
def buffers_unchanged(block: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in before:
                buffer.copy_(old)


def recompute_blocks(network: nn.Module) -> None:
    """Make the backward pass recompute all blocks of ``network``, in place.

    Call it before dividing or compiling; copies, such as pipeline stages, inherit it. Raises ``UserError`` for a model
    without blocks.
    """
    blocks = block_names(network)
    if not blocks:
        raise UserError(
            "training.recompute: this model repeats no kind of module, so it has no blocks to recompute; expected "
            "none, or a method plan() that names the blocks (slipstream/shared/models/plan.py)"
        )
    for name in blocks:
        block = network.get_submodule(name)
        # Without ``setattr``: an attribute of the instance takes precedence over the method.
        vars(block)["forward"] = RecomputedForward(block)
