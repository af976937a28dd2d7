"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): of each block the
backward pass keeps its inputs alone, and computes the rest once more.

The block's random numbers are drawn again as they were, so the gradients are the same, bit for bit; the price is
another forward pass. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UserError
from slipstream.models.plan import blocks_of


class Recomputed:
    """Stands for the ``forward`` of a block. Without gradients, as in evaluation, it is that and no more."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        #: What is computed, and computed again. Whoever compiles the block compiles this.
        self.forward: Callable[..., Any] = block.forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        return checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """For the first time, and for the second, which must not count a batch's statistics twice."""
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
    """Let the backward pass recompute all blocks of ``network``, in place; before it is divided or compiled, and its
    copies, such as the stages of a pipeline, do so, too. Raises ``UserError`` for a model without blocks."""
    blocks = blocks_of(network)
    if not blocks:
        raise UserError(
            "training.recompute: none expected: no kind of module is repeated in this model, so that it has no blocks "
            "to recompute; a method plan() may state some (slipstream/models/plan.py)"
        )
    for name in blocks:
        block = network.get_submodule(name)
        # Past ``setattr``: an attribute of the instance goes before the method of its class.
        vars(block)["forward"] = Recomputed(block)
