"""Model replicated on every rank, with DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from slipstream.pipeline.train.loop.probe import ROWS, ModelTraits, running_statistics, unchanged_after
from slipstream.pipeline.train.parallel.compiled import CompiledTraining
from slipstream.pipeline.train.parallel.config import GradientsConfig
from slipstream.pipeline.train.parallel.model import Forward, LossOf, ParallelModel
from slipstream.pipeline.train.parallel.powersgd import PowerSGD
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import SOMETIMES_UNUSED
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.torch_versions import wrap_in_ddp
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.models.trained import Weights

LOG = logger("train")


class ReplicatedModel(ParallelModel):
    """Model with a replica on every process.

    ``ddp`` averages the gradients, with ``powersgd`` if that is its hook; ``ddp`` is None for a single process.
    """

    is_whole = True

    def __init__(
        self,
        model: Predictor,
        traits: ModelTraits | None = None,
        ddp: DistributedDataParallel | None = None,
        powersgd: PowerSGD | None = None,
    ) -> None:
        self.model, self.model_parts = model, [model]
        self._has_batch_statistics = traits is not None and traits.has_batch_statistics
        self.ddp = ddp
        self._powersgd = powersgd
        self.parts = {"gradients": powersgd} if powersgd else {}
        self._parameters = list(model.parameters())

    def sharing_rows(self, group: RankContext) -> RankContext:
        return group

    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        model = self.ddp or self.model
        for index, piece in enumerate(pieces):
            rows = [x[piece] for x in inputs]
            if piece.stop == piece.start:
                # A rank without rows still joins the all-reduce of the gradient.
                rows = zero_inputs(self.model.signature, ROWS, inputs[0].device)
            alone = self._has_batch_statistics and piece.stop - piece.start < ROWS
            last = index == len(pieces) - 1
            with nullcontext() if last or self.ddp is None else self.ddp.no_sync(), self.compiled():
                with forward(), running_statistics(self.model) if alone else nullcontext():
                    outputs = model(*rows)
                loss_of(outputs, piece.start).backward()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def norm(self) -> Tensor:
        # Same as torch's ``get_total_norm``, without sorting tensors by device and dtype first.
        norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
        return torch.linalg.vector_norm(torch.stack(norms))

    def clip(self, norm: Tensor, largest: float) -> None:
        clip_grads_with_norm_(self._parameters, largest, norm)

    def after_step(self, skip: Tensor) -> None:
        if self._powersgd:
            self._powersgd.after_step(skip.bool())

    def whole(self, tensors: Mapping[str, Tensor]) -> Weights:
        return Weights.of(tensors)


class SingleModel(ReplicatedModel):
    """Model of a single process that raises DDP's error for unused parameters.

    So it accepts only models that several processes can train, too.
    """

    def __init__(self, model: Predictor, traits: ModelTraits) -> None:
        super().__init__(model, traits)
        self._required = [] if traits.unused else [p for p in self._parameters if p.requires_grad]

    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        super().accumulate(inputs, pieces, loss_of, forward)
        if any(parameter.grad is None for parameter in self._required):
            raise UserError(SOMETIMES_UNUSED)


def uses_ddp(world: int, settings: GradientsConfig) -> bool:
    """Return True if ``world`` replicas need DDP: there are several, or a hook changes the gradients."""
    return world > 1 or settings.hook != "none"


def replicate_model(
    model: Predictor,
    traits: ModelTraits,
    group: RankContext,
    settings: GradientsConfig | None = None,
    seed: int = 0,
    compiled: CompiledTraining | None = None,
) -> ReplicatedModel:
    """Wrap the model in DDP with the gradient exchange of ``settings``.

    DDP copies gradients into buckets, so a single process uses it only if a hook changes the gradients. Training passes
    run the blocks of ``compiled``, if given. DDP's broadcast of all buffers before every forward pass is switched off;
    instead, :func:`~slipstream.pipeline.train.loop.step.broadcast_buffers` broadcasts only buffers that change.
    """
    if traits.unused and group.rank == 0:
        LOG.warning("%d parameters take no part in the loss: %s", len(traits.unused), ", ".join(traits.unused[:3]))
    settings = settings or GradientsConfig()
    context = compiled.context if compiled else nullcontext
    blocks = compiled.blocks if compiled else nullcontext
    if not uses_ddp(group.world, settings):
        alone = SingleModel(model, traits)
        alone.compiled = blocks
        return alone
    ddp = wrap_in_ddp(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        find_unused_parameters=bool(traits.unused),
        bucket_cap_mb=settings.bucket_cap_mb or None,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=settings.static_graph,
    )
    powersgd = PowerSGD(settings.rank, seed, group) if settings.hook == "powersgd" else None
    inputs = compiled.inputs if compiled else zero_inputs(model.signature, ROWS, group.device)

    def pass_over_zeros() -> None:
        with unchanged_after(model):
            with context(), blocks():
                outputs = ddp(*inputs)
            (outputs.sum() * 0).backward()

    # Two passes over zeros make DDP rebuild its gradient buckets before the first training step. DDP does so after its
    # first backward pass, which changes the order of its sums. In a resumed process that would be the first *resumed*
    # step, and from three ranks on the results would differ from an uninterrupted run.
    for _ in range(2):
        pass_over_zeros()
    if powersgd:
        # Torch rejects annotations that are strings, as in this module.
        ddp.register_comm_hook(powersgd, lambda hook, bucket: hook(bucket))
        pass_over_zeros()
    elif settings.hook != "none":
        ddp.register_comm_hook(None, fp16_compress_hook if settings.hook == "fp16" else bf16_compress_hook)
    replicated = ReplicatedModel(model, traits, ddp, powersgd)
    replicated.compiled = blocks
    return replicated


def check_exchange(settings: GradientsConfig, backend: str, precision: str) -> None:
    """Raise ``UserError`` if backend or precision do not support the gradient compression."""
    if settings.hook == "bf16" and backend != "nccl":
        raise settings.reject("hook", f"fp16 or powersgd over {backend}: only NCCL has the bf16 hook")
    if settings.hook == "powersgd" and precision == "fp16":
        raise settings.reject("hook", "another, or training.precision bf16 or fp32: fp16's loss scale changes")
