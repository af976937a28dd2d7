"""The model on every rank: DDP, and what it leaves to its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tasks.distributed.process_group import Group
from tasks.logs import logger
from tasks.models.factory import Predictor, zeros
from tasks.train.loop.coupled_rows import ROWS, running_statistics
from tasks.train.loop.probe import Traits, undone
from tasks.train.parallel.model import Forward, LossOf, ParallelModel

LOG = logger("train")


class ReplicatedModel(ParallelModel):
    """A model of which every process holds a replica. ``ddp`` averages the gradients of all; without it the process
    trains alone."""

    is_whole = True

    def __init__(
        self, model: Predictor, traits: Traits | None = None, ddp: DistributedDataParallel | None = None
    ) -> None:
        self.model = model
        self._couples_rows = traits is not None and traits.couples_rows
        self.ddp = ddp
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
            alone = self._couples_rows and piece.stop - piece.start < ROWS
            last = index == len(pieces) - 1
            with nullcontext() if last or self.ddp is None else self.ddp.no_sync():
                with forward(), running_statistics(self.model) if alone else nullcontext():
                    outputs = model(*rows)
                loss_of(outputs, piece.start).backward()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def norm(self) -> Tensor:
        return get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def clip(self, norm: Tensor, largest: float) -> None:
        clip_grads_with_norm_(self._parameters, largest, norm)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors


def replicate(model: Predictor, traits: Traits, group: Group) -> ReplicatedModel:
    """Wrap the model so that backward passes average the gradient over all ranks.

    DDP broadcasts all buffers before every forward pass, constant ones too, so that is switched off;
    :func:`~tasks.train.loop.coupled_rows.broadcast_buffers` does it for those that change. Two passes over zeros make
    DDP rebuild its gradient buckets before the first training step: it does so after its first backward pass, which
    changes the order of its sums. A resumed process would do so after its first *resumed* step, and from three ranks on
    its numbers would differ from those of an uninterrupted run.
    """
    if traits.unused and group.rank == 0:
        LOG.warning("%d parameters take no part in the loss: %s", len(traits.unused), ", ".join(traits.unused[:3]))
    ddp = DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        forward_sync_buffers=False,
        find_unused_parameters=bool(traits.unused),
    )
    with undone(model):
        inputs = [x.to(group.device) for x in zeros(model.signature, ROWS)]
        for _ in range(2):
            (ddp(*inputs).sum() * 0).backward()
    return ReplicatedModel(model, traits, ddp)
