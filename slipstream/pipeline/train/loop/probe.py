"""Probe of a model by one training pass, before training starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from slipstream.pipeline.train.checkpoint.state import capture_random_state, restore_random_state
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning, torch_user_error
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.network import numbers_in, numbers_trained
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.models.flops import training_flops

#: Attention kernels with a FLOP formula here: torch's counter omits the CPU kernel, and counts the recomputation in the
#: backward passes of the others.
ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
#: Number of rows of the probe: batch normalisation needs two for a variance.
ROWS = 2


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of attention from tensor shapes, with key and value heads repeated to match the query.

    torch 2.11 cannot count shared heads.
    """
    heads = query[1]
    return sdpa_flop_count(query, (key[0], heads, *key[2:]), (value[0], heads, *value[2:]))


def attention_backward_flops(_: object, *arguments: Sequence[int], **__: object) -> int:
    return 2 * attention_flops(*arguments[:3])


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the FLOPs of matmuls, convolutions and attention.

    ``get_total_flops()`` returns the sum.
    """
    kernels = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in ATTENTION}
    backwards = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward") for name in ATTENTION}
    formulas: dict[object, Callable[..., int]] = dict.fromkeys(kernels.values(), attention_flops) | dict.fromkeys(
        backwards.values(), attention_backward_flops
    )
    return FlopCounterMode(display=False, custom_mapping=formulas)


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model that decide how it is trained."""

    #: Names of trained parameters that receive no gradient.
    unused: tuple[str, ...] = ()
    #: Names of all buffers of modules that change a buffer in a forward pass, such as running statistics.
    changing: tuple[str, ...] = ()
    #: True if the rows of a micro-batch influence each other, as in batch normalisation; then no row may be padding.
    has_batch_statistics: bool = False
    #: Floating-point operations of forward and backward pass per row, from the shapes of a built-in model
    #: (:mod:`slipstream.shared.models.flops`), else by :func:`flop_counter`.
    flops_per_row: float = 0.0
    #: Number of elements in all parameters; shared parameters count once.
    parameters: int = 0
    #: Number of elements in trained parameters.
    trained: int = 0


def probe_model(model: Predictor, device: torch.device) -> ModelTraits:
    """Run one forward and backward pass on zeros in training mode, and restore the model.

    Raises ``UserError`` if the model fails.
    """
    with unchanged_after(model):
        before = {name: (buffer._version, buffer.clone()) for name, buffer in model.named_buffers()}
        counter, flops = flop_counter(), training_flops(model.network, model.signature)
        try:
            with counter if flops is None else nullcontext():
                model(*zero_inputs(model.signature, ROWS, device)).sum().backward()
        except Exception as error:
            if error_meaning(error) is ErrorMeaning.BROKEN:
                raise
            raise torch_user_error(error) or UserError(
                f"model.name: cannot be trained on this data: {type(error).__name__}: {error}; it was given {ROWS} rows"
            ) from error
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        # The version counter misses batch normalisation's mean, and zeros need not change its value.
        changed = {
            name.rpartition(".")[0]
            for name, buffer in model.named_buffers()
            if buffer._version != before[name][0] or not torch.equal(buffer, before[name][1])
        }
        changing = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in changed]
    normalised = any(isinstance(module, _BatchNorm) for module in model.modules())
    has_batch_statistics = bool(changing) or normalised
    return ModelTraits(
        tuple(unused),
        tuple(changing),
        has_batch_statistics,
        flops_per_row=counter.get_total_flops() / ROWS if flops is None else float(flops),
        parameters=numbers_in(model),
        trained=numbers_trained(model),
    )


@contextmanager
def unchanged_after(model: Predictor) -> Iterator[None]:
    """Restore random generators and the model's buffers after the block, and clear its gradients."""
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


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """Switch batch normalisation to its running statistics, because one row has no variance."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for layer in layers:
        layer.train(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.train(True)
