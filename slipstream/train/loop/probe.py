"""What one training pass shows about a model, before it is copied to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.distributed.explained import explained
from slipstream.errors import UserError
from slipstream.models.factory import Predictor, zeros
from slipstream.train.checkpoint.random_state import capture_random_state, restore_random_state
from slipstream.train.loop.batch_statistics import ROWS
from slipstream.train.metrics.flops import flop_counter


@dataclass(frozen=True)
class Traits:
    """The properties of a model that decide how it is trained."""

    #: The parameters that got no gradient.
    unused: tuple[str, ...] = ()
    #: The buffers of modules that change any of theirs in a forward pass, such as running statistics.
    changing: tuple[str, ...] = ()
    #: Whether the rows of a micro-batch influence each other, as in batch normalisation; then none may be padding.
    has_batch_statistics: bool = False
    #: Floating-point operations of forward and backward pass over a row, see :mod:`slipstream.train.metrics.flops`.
    flops_per_row: float = 0.0
    #: Numbers in all parameters, shared ones counted once.
    parameters: int = 0


def probe(model: Predictor, device: torch.device) -> Traits:
    """Run forward and backward over zeros in training mode, and undo what that changes.

    Raises ``UserError`` if the model cannot.
    """
    with undone(model):
        before = {name: (buffer._version, buffer.clone()) for name, buffer in model.named_buffers()}
        counter = flop_counter()
        try:
            with counter:
                model(*(x.to(device) for x in zeros(model.signature, ROWS))).sum().backward()
        except Exception as error:
            raise explained(error) or UserError(
                f"model.name: cannot be trained on this data: {type(error).__name__}: {error}; it was given {ROWS} rows"
            ) from error
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        # Batch normalisation changes its mean without telling; of zeros the mean need not even become another.
        changed = {
            name.rpartition(".")[0]
            for name, buffer in model.named_buffers()
            if buffer._version != before[name][0] or not torch.equal(buffer, before[name][1])
        }
        changing = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in changed]
    normalised = any(isinstance(module, _BatchNorm) for module in model.modules())
    has_batch_statistics = bool(changing) or normalised
    flops_per_row, parameters = counter.get_total_flops() / ROWS, sum(p.numel() for p in model.parameters())
    return Traits(tuple(unused), tuple(changing), has_batch_statistics, flops_per_row, parameters)


@contextmanager
def undone(model: Predictor) -> Iterator[None]:
    """Restore the random generators and the model's buffers after the block, and drop its gradients."""
    random = capture_random_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        restore_random_state(random)
