"""The model's pass in training, compiled by ``torch.compile`` before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.artifacts.results.training import CompiledPass
from slipstream.errors import UserError
from slipstream.models.factory import Predictor
from slipstream.train.loop.probe import undone

#: Passes that are timed with and without; the fastest counts.
TIMED = 3


@dataclass(frozen=True)
class Compiled:
    """The model as :class:`~slipstream.train.parallel.replicas.ReplicatedModel` calls it in training."""

    module: nn.Module
    #: A micro-batch of padding, and the context that passes run in.
    inputs: tuple[Tensor, ...]
    context: Callable[[], AbstractContextManager[object]]
    figures: CompiledPass


def compiled(
    model: Predictor, inputs: tuple[Tensor, ...], context: Callable[[], AbstractContextManager[object]]
) -> Compiled:
    """Compile forward and backward pass for ``inputs``, a micro-batch as training will have them: their strides are
    part of what is compiled for. Raises ``UserError`` if that fails, as without a C++ compiler."""
    module = cast(nn.Module, torch.compile(model, dynamic=False))

    def seconds(of: Callable[..., Tensor]) -> float:
        started = time.perf_counter()
        with context():
            outputs = of(*inputs)
        outputs.sum().backward()
        # Also waits for a GPU.
        outputs.sum().item()
        return time.perf_counter() - started

    with undone(model):
        try:
            first = seconds(module)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"training.compile: false expected: the model cannot be compiled here ({type(error).__name__}: "
                f"{reason}); on a CPU that takes g++, on a GPU Triton and a C compiler"
            ) from error
        with_it = min(seconds(module) for _ in range(TIMED))
        without = min(seconds(model) for _ in range(TIMED))
    figures = CompiledPass(seconds=first - with_it, pass_s=with_it, plain_pass_s=without)
    return Compiled(module, inputs, context, figures)
