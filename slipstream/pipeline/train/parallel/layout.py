"""Device mesh of all processes, and this process's coordinates.

The dimensions are ``pipeline``, ``replicate``, ``shard`` and ``tensor``, in this order. Tensor parallelism sends the
most data, so its processes are neighbours; pipeline stages are furthest apart.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slipstream.pipeline.train.checkpoint.state import Stateful
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.errors import UserError
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.initial.drawn import InitialValues
from slipstream.shared.models.plan import ParallelPlan
from slipstream.shared.models.trained import Weights

DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")
#: Dimensions along which gradients are averaged.
DATA = ("replicate", "shard")


@dataclass(frozen=True)
class Layout:
    """Division of the model among all processes, and this process's coordinates.

    A process trains on the rows of data-parallel rank ``data_rank`` of ``data_size``, like its tensor-parallel peers
    and pipeline stages. ``mesh`` is None if nothing is divided.
    """

    config: ParallelConfig
    rank: int
    world: int
    sizes: tuple[int, ...]
    mesh: DeviceMesh | None = None

    @classmethod
    def connect(cls, config: ParallelConfig, rank: int, world: int, device: torch.device) -> Layout:
        """Create the device mesh and its process groups. Collective.

        Raises ``UserError`` like :meth:`~slipstream.pipeline.train.parallel.config.ParallelConfig.sizes`.
        """
        sizes = config.sizes(world, count_nodes(world))
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS) if config.divides else None
        return cls(config, rank, world, sizes, mesh)

    def coordinate(self, dimension: str) -> int:
        """Return this process's coordinate along a dimension."""
        index = DIMENSIONS.index(dimension)
        below = 1
        for size in self.sizes[index + 1 :]:
            below *= size
        return self.rank // below % self.sizes[index]

    def size(self, dimension: str) -> int:
        return self.sizes[DIMENSIONS.index(dimension)]

    @property
    def data_rank(self) -> int:
        return self.coordinate("replicate") * self.size("shard") + self.coordinate("shard")

    @property
    def data_size(self) -> int:
        return self.size("replicate") * self.size("shard")

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the pipeline stages on this process."""
        processes = self.size("pipeline")
        return tuple(self.coordinate("pipeline") + turn * processes for turn in range(self.config.stages_per_rank))

    @property
    def all_stages(self) -> int:
        return self.size("pipeline") * self.config.stages_per_rank

    @property
    def has_losses(self) -> bool:
        """True if this process has the last pipeline stage, which computes the losses."""
        return self.all_stages - 1 in self.stages


def count_nodes(world: int) -> int:
    """Return the number of nodes by torchrun's ``LOCAL_WORLD_SIZE``; 1 without it."""
    return max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def check_plan(config: ParallelConfig, plan: ParallelPlan | None, micro_batches: int, *, adapted: bool = False) -> None:
    """Raise ``UserError`` if the model's plan does not allow the layout.

    Also raises if there are too few micro-batches for the stages. ``adapted`` means that adapters are trained.
    """
    if config.pipeline == config.tensor == 1:
        return
    if plan is None:
        name = "pipeline" if config.pipeline > 1 else "tensor"
        raise UserError(
            f"training.parallel.{name}: this model states no plan for it (slipstream/shared/models/plan.py); expected "
            "1, or "
            "training.parallel.shard, which needs no plan"
        )
    if config.tensor > 1 and adapted:
        raise UserError(
            "training.parallel.tensor: the adapters of model.lora cannot be divided; expected 1, or "
            "training.parallel.shard or pipeline"
        )
    if config.tensor > 1 and not plan.tensor:
        raise UserError(
            "training.parallel.tensor: this model's plan does not say how its modules are divided (Plan.tensor); "
            "expected 1"
        )
    for name, size in plan.divisible.items() if config.tensor > 1 else ():
        if size % config.tensor:
            raise UserError(f"training.parallel.tensor: {config.tensor} does not divide the model's {name}, {size}")
    if config.tensor > 1 and config.sequence and plan.sequence % config.tensor:
        raise UserError(
            f"training.parallel.sequence: tensor {config.tensor} does not divide rows of {plan.sequence} tokens; "
            "expected false"
        )
    stages = config.pipeline * config.stages_per_rank
    if stages > len(plan.blocks):
        raise UserError(
            f"training.parallel.pipeline: {stages} stages for {len(plan.blocks)} blocks; expected at most one per block"
        )
    if config.pipeline > 1 and micro_batches < stages:
        raise UserError(
            f"training.accumulation: {micro_batches} micro-batches for a pipeline of {stages} stages; expected at "
            f"least {stages}, and at least as many rows in every rank's batch"
        )
    if config.schedule == "interleaved" and micro_batches % config.pipeline:
        raise UserError(
            f"training.accumulation: {micro_batches} micro-batches for an interleaved pipeline of {config.pipeline} "
            f"processes; expected a multiple of {config.pipeline}"
        )


#: Function from a micro-batch's outputs, and the position of its first row in the batch, to its loss.
LossOf = Callable[[Tensor, int], Tensor]
#: Function that returns the context for a forward pass, such as autocast.
Forward = Callable[[], AbstractContextManager[object]]


def documents_of(documents: Tensor | None, piece: int) -> dict[str, Tensor]:
    """Return the arguments of a model for micro-batch number ``piece`` of a batch with these ``documents``."""
    return {} if documents is None else {"documents": documents[piece : piece + 1]}


class ParallelModel(ABC):
    """This process's part of a model, with its forward and backward passes.

    Every method is collective.
    """

    #: Module with this process's parameters, under the names of the whole model.
    model: Predictor
    #: Modules to run: the model, or this process's pipeline stages.
    model_parts: Sequence[Predictor]
    #: Required number of rows for :meth:`forward`; 0 allows any.
    batch_rows: int = 0
    #: True on exactly one of the processes that train on the same rows: it adds up their losses.
    counts_losses: bool = True
    #: True if this process holds the whole model, so that it can run without other processes.
    is_whole: bool = False
    #: True if a fused optimiser may scale the gradients in its step, instead of :meth:`clip`.
    clips_in_step: bool = True
    #: Additional state for checkpoints, by name.
    parts: Mapping[str, Stateful] = MappingProxyType({})
    #: Context of compiled training passes, in addition to the caller's.
    compiled: Forward = nullcontext

    @abstractmethod
    def sharing_rows(self, group: RankContext) -> RankContext:
        """Return the group of data-parallel processes that divide a batch, with this process's position."""

    @abstractmethod
    def accumulate(
        self,
        inputs: Sequence[Tensor],
        pieces: Sequence[slice],
        loss_of: LossOf,
        forward: Forward = nullcontext,
        documents: Tensor | None = None,
    ) -> None:
        """Add the gradients of the micro-batches ``pieces`` of the batch ``inputs``.

        Forward passes run in the context ``forward()``. ``loss_of(outputs, first row)`` returns the loss of a
        micro-batch, scaled so that the mean gradient over all data-parallel processes is the batch's gradient. It is
        called on the last stage of a pipeline. ``documents`` are those of :class:`.Batch`. The resulting gradients are
        complete, and equal on all holders of a part.
        """

    @abstractmethod
    def forward(self, *inputs: Tensor, documents: Tensor | None = None) -> Tensor | None:
        """Return the outputs of a batch in evaluation; None before the last pipeline stage.

        ``documents`` are those of :class:`.Batch`.
        """

    @abstractmethod
    def fill(self, values: InitialValues, *, own: bool) -> None:
        """Fill the weights that checkpoints hold (``own``), or all others, with initial values.

        A rank fills only its part, without other ranks. Raises ``UserError`` if values are missing.
        """

    @abstractmethod
    def share_filled(self, *, own: bool) -> None:
        """Send the parts that :meth:`fill` filled to the ranks that also hold them."""

    @abstractmethod
    def norm(self) -> Tensor:
        """Return the L2 norm of the whole model's gradient.

        It is a scalar, equal on all ranks, and non-finite if any gradient is.
        """

    @abstractmethod
    def clip(self, norm: Tensor, largest: float) -> None:
        """Scale the gradients down to norm ``largest`` if ``norm``, of the whole model's gradient, is larger."""

    @abstractmethod
    def after_step(self, skip: Tensor) -> None:
        """Update state of the gradient exchange after a step, unless ``skip`` (a scalar on the device) is 1."""

    @abstractmethod
    def whole(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Return undivided tensors on rank 0, gathered from ``tensors``, one at a time.

        Collective: all ranks must iterate, though only rank 0 gets values.
        """
