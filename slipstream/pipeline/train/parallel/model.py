"""Interface between the training loop and a model trained by several processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

from torch import Tensor

from slipstream.pipeline.train.checkpoint.state import Stateful
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.trained import Weights

#: Function from a micro-batch's outputs, and the position of its first row in the batch, to its loss.
LossOf = Callable[[Tensor, int], Tensor]
#: Function that returns the context for a forward pass, such as autocast.
Forward = Callable[[], AbstractContextManager[object]]


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
    #: Additional state for checkpoints, by name.
    parts: Mapping[str, Stateful] = MappingProxyType({})
    #: Context of compiled training passes, in addition to the caller's.
    compiled: Forward = nullcontext

    @abstractmethod
    def sharing_rows(self, group: RankContext) -> RankContext:
        """Return the group of data-parallel processes that divide a batch, with this process's position."""

    @abstractmethod
    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        """Add the gradients of the micro-batches ``pieces`` of the batch ``inputs``.

        Forward passes run in the context ``forward()``. ``loss_of(outputs, first row)`` returns the loss of a
        micro-batch, scaled so that the mean gradient over all data-parallel processes is the batch's gradient. It is
        called where the outputs are: on the last stage of a pipeline. The resulting gradients are complete, and equal
        on all processes that hold the same part.
        """

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor | None:
        """Return the outputs of a batch in evaluation; None before the last pipeline stage."""

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
