"""The model on every rank: DDP, what it leaves to its users, and the pass that ``torch.compile`` makes before the first
step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from slipstream.artifacts.results.training import CompiledPass
from slipstream.distributed.process_group import Group
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.models.factory import Predictor, zeros
from slipstream.models.trained import Weights
from slipstream.train.loop.probe import ROWS, Traits, running_statistics, unchanged_after
from slipstream.train.parallel.config import GradientsConfig
from slipstream.train.parallel.model import Forward, LossOf, ParallelModel
from slipstream.train.parallel.powersgd import PowerSGD

#: Passes that are timed with and without; the fastest counts.
TIMED = 3
LOG = logger("train")


@dataclass(frozen=True)
class Compiled:
    """The model as :class:`~slipstream.train.parallel.replicas.ReplicatedModel` calls it in training."""

    module: nn.Module
    #: A micro-batch of padding, and the context that passes run in.
    inputs: tuple[Tensor, ...]
    context: Callable[[], AbstractContextManager[object]]
    figures: CompiledPass


def compile_model(
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

    with unchanged_after(model):
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


class ReplicatedModel(ParallelModel):
    """A model of which every process holds a replica. ``ddp`` averages the gradients of all, with ``powersgd`` if that
    is its hook; without it the process trains alone."""

    is_whole = True

    def __init__(
        self,
        model: Predictor,
        traits: Traits | None = None,
        ddp: DistributedDataParallel | None = None,
        powersgd: PowerSGD | None = None,
    ) -> None:
        self.model = model
        self._has_batch_statistics = traits is not None and traits.has_batch_statistics
        self.ddp = ddp
        self._powersgd = powersgd
        self.parts = {"gradients": powersgd} if powersgd else {}
        self._parameters = list(model.parameters())

    def sharing_rows(self, group: Group) -> Group:
        return group

    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        model = self.ddp or self.model
        for index, piece in enumerate(pieces):
            rows = [x[piece] for x in inputs]
            if piece.stop == piece.start:
                # A rank without rows still takes part in the all-reduce of the gradient.
                rows = [x.to(inputs[0].device) for x in zeros(self.model.signature, ROWS)]
            alone = self._has_batch_statistics and piece.stop - piece.start < ROWS
            last = index == len(pieces) - 1
            with nullcontext() if last or self.ddp is None else self.ddp.no_sync():
                with forward(), running_statistics(self.model) if alone else nullcontext():
                    outputs = model(*rows)
                loss_of(outputs, piece.start).backward()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def norm(self) -> Tensor:
        # What torch's ``get_total_norm`` computes, without sorting tensors by device and type first.
        norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip(self, norm: Tensor, largest: float) -> None:
        clip_grads_with_norm_(self._parameters, largest, norm)

    def after_step(self, skip: Tensor) -> None:
        if self._powersgd:
            self._powersgd.after_step(skip.bool())

    def whole(self, tensors: Mapping[str, Tensor]) -> Weights:
        return Weights.of(tensors)


def replicate(
    model: Predictor,
    traits: Traits,
    group: Group,
    settings: GradientsConfig | None = None,
    seed: int = 0,
    compiled: Compiled | None = None,
) -> ReplicatedModel:
    """Wrap the model so that backward passes average the gradient over all ranks, exchanged by ``settings``. If it is
    ``compiled``, training calls that, and evaluation the model.

    DDP broadcasts all buffers before every forward pass, constant ones too, so that is switched off;
    :func:`~slipstream.train.loop.step.broadcast_buffers` does it for those that change. Two passes over
    zeros make DDP rebuild its gradient buckets before the first training step: it does so after its first backward
    pass, which changes the order of its sums. A resumed process would do so after its first *resumed* step, and from
    three ranks on its numbers would differ from those of an uninterrupted run.
    """
    if traits.unused and group.rank == 0:
        LOG.warning("%d parameters take no part in the loss: %s", len(traits.unused), ", ".join(traits.unused[:3]))
    settings = settings or GradientsConfig()
    ddp = DistributedDataParallel(
        compiled.module if compiled else model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        forward_sync_buffers=False,
        find_unused_parameters=bool(traits.unused),
        bucket_cap_mb=settings.bucket_cap_mb or None,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=settings.static_graph,
    )
    powersgd = PowerSGD(settings.rank, seed, group) if settings.hook == "powersgd" else None
    inputs = compiled.inputs if compiled else [x.to(group.device) for x in zeros(model.signature, ROWS)]
    context = compiled.context if compiled else nullcontext

    def pass_over_zeros() -> None:
        with unchanged_after(model):
            with context():
                outputs = ddp(*inputs)
            (outputs.sum() * 0).backward()

    for _ in range(2):
        pass_over_zeros()
    if powersgd:
        # Torch refuses annotations that are text, as they are here.
        ddp.register_comm_hook(powersgd, lambda hook, bucket: hook(bucket))
        pass_over_zeros()
    elif settings.hook != "none":
        ddp.register_comm_hook(None, fp16_compress_hook if settings.hook == "fp16" else bf16_compress_hook)
    return ReplicatedModel(model, traits, ddp, powersgd)


def check_exchange(settings: GradientsConfig, backend: str, precision: str) -> None:
    """Raise ``UserError`` if gradients cannot be exchanged so over this backend."""
    if settings.hook == "bf16" and backend != "nccl":
        raise settings.reject("hook", f"fp16 or powersgd over {backend}: the bf16 hook is NCCL's alone")
    if settings.hook == "powersgd" and precision == "fp16":
        raise settings.reject("hook", "another, or training.precision bf16 or fp32: fp16's loss scale changes")
