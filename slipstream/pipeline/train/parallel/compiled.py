"""Block-wise ``torch.compile`` of a model, as in TorchTitan (Liang et al. 2024).

Of a model compiled as a whole, all gradients appear at the end of the backward pass, so their exchange cannot overlap
it. Nor can FSDP2 gather and free weights by block. Equal blocks share compiled code; torch compiles at most eight kinds
of blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.pipeline.train.device_clock import synchronise_device
from slipstream.pipeline.train.loop.probe import unchanged_after
from slipstream.pipeline.train.parallel.layout import ParallelModel
from slipstream.shared.artifacts.results.training import CompiledPass
from slipstream.shared.distributed.user_errors import error_meaning
from slipstream.shared.errors import UserError
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.plan import block_names

#: Number of steps to time with and without compilation; the fastest counts.
TIMED = 3


def compiled_modules(model: Predictor) -> list[nn.Module]:
    """Return the modules to compile: blocks, or the whole model if its blocks are single layers.

    A single layer has nothing to fuse.
    """
    blocks = dict.fromkeys(model.network.get_submodule(name) for name in block_names(model.network))
    return [block for block in blocks if any(True for _ in block.children())] or [model]


class CompiledBlocks:
    """Blocks whose forward and backward passes are compiled within ``with blocks():``.

    Recomputation in the backward pass is compiled, too. The code is for one shape of micro-batches; outside the
    context, as in evaluation, the original modules run.
    """

    def __init__(self, models: Sequence[Predictor]) -> None:
        modules = [module for model in models for module in compiled_modules(model)]
        # Compile the function that is recomputed; otherwise the compiler would choose which activations to keep.
        recomputed = [vars(module).get("forward") for module in modules]
        places = [r if isinstance(r, RecomputedForward) else m for m, r in zip(modules, recomputed, strict=True)]
        self._forward = [(place, torch.compile(place.forward, dynamic=False)) for place in places]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        # Replace only ``forward``, so that hooks run around it; not by ``setattr``, which looks for parameters first.
        own = [(place, vars(place).get("forward")) for place, _ in self._forward]
        for place, forward in self._forward:
            vars(place)["forward"] = forward
        try:
            yield
        finally:
            for place, before in own:
                if before is None:
                    del vars(place)["forward"]
                else:  # set by other code, such as a library that wraps modules
                    vars(place)["forward"] = before


@dataclass(frozen=True)
class CompiledTraining:
    """Compiled ``blocks`` for micro-batches like ``inputs`` with ``documents``, and their speedup (``figures``).

    ``context`` is that of forward passes, such as autocast.
    """

    blocks: CompiledBlocks
    inputs: tuple[Tensor, ...]
    context: Callable[[], AbstractContextManager[object]]
    figures: CompiledPass
    documents: Tensor | None = None
    #: Number of graphs that this process had compiled by then.
    graphs: int = field(default_factory=lambda: compiled_graphs())

    def figures_at_end(self) -> CompiledPass:
        """Return the figures with the number of graphs that were compiled during training."""
        return replace(self.figures, recompilations=compiled_graphs() - self.graphs)


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_blocks(
    parallel: ParallelModel,
    batch: Sequence[Tensor],
    pieces: Sequence[slice],
    context: Callable[[], AbstractContextManager[object]],
    documents: Tensor | None = None,
) -> CompiledTraining:
    """Compile this process's part of ``parallel`` for the micro-batches ``pieces`` of ``batch``.

    Real slices are needed, because compiled code depends on strides. Collective among the ranks that share a divided
    model. Raises ``UserError`` if compilation fails.
    """
    # The import takes a second. Otherwise kernels would be chosen by times on the device, which vary.
    from torch._inductor import config as inductor

    inductor.deterministic = torch.are_deterministic_algorithms_enabled()
    blocks = CompiledBlocks(parallel.model_parts)

    def seconds() -> float:
        started = time.perf_counter()
        parallel.accumulate(batch, pieces, lambda outputs, _: outputs.sum(), context, documents)
        parallel.model.zero_grad(set_to_none=True)
        synchronise_device(batch[0].device)
        return (time.perf_counter() - started) / len(pieces)

    with unchanged_after(parallel.model):
        without = min(seconds() for _ in range(TIMED))
        parallel.compiled = blocks
        try:
            first = seconds()
        except Exception as error:
            parallel.compiled = nullcontext
            if error_meaning(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"training.compile: the model cannot be compiled here ({type(error).__name__}: {reason}); expected "
                "false, or g++ on a CPU, Triton and a C compiler on a GPU"
            ) from error
        with_it = min(seconds() for _ in range(TIMED))
    figures = CompiledPass(seconds=(first - with_it) * len(pieces), pass_s=with_it, plain_pass_s=without)
    return CompiledTraining(blocks, tuple(x[pieces[0]] for x in batch), context, figures, documents)


# Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". Random numbers are replayed, so gradients
# are bitwise equal; the cost is another forward pass. Parameters keep their names.
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
            "null, or a method plan() that names the blocks (slipstream/shared/models/plan.py)"
        )
    for name in blocks:
        block = network.get_submodule(name)
        # Without ``setattr``: an attribute of the instance takes precedence over the method.
        vars(block)["forward"] = RecomputedForward(block)
