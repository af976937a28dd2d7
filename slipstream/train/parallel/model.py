"""Interface of the training loop to a model trained by several processes, however divided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

from torch import Tensor

from slipstream.distributed.process_group import Group
from slipstream.models.factory import Predictor
from slipstream.models.trained import Weights
from slipstream.train.checkpoint.state import Stateful

#: Returns the loss of a micro-batch's outputs, given the position of its first row in the batch.
LossOf = Callable[[Tensor, int], Tensor]
#: Returns the context of a forward pass.
Forward = Callable[[], AbstractContextManager[object]]


class ParallelModel(ABC):
    """This process's part of a model, and its passes.

    Every method is collective.
    """

    #: Parameters of this process, by the names of the whole model.
    model: Predictor
    #: Modules to run: the model, or the stages of a pipeline.
    model_parts: Sequence[Predictor]
    #: The only number of rows that :meth:`forward` takes; 0 for any.
    batch_rows: int = 0
    #: True if this process is the first that computes the losses of its rows.
    counts_losses: bool = True
    #: True if this process holds the whole model, and can test rows without the others.
    is_whole: bool = False
    #: Additional state for checkpoints, by name.
    parts: Mapping[str, Stateful] = MappingProxyType({})
    #: Context of compiled training passes, in addition to the caller's.
    compiled: Forward = nullcontext

    @abstractmethod
    def sharing_rows(self, group: Group) -> Group:
        """Return this process's place among those that divide the rows of a batch."""

    @abstractmethod
    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        """Add the gradients of the micro-batches ``pieces`` of the batch ``inputs``.

        Forward passes run in the context ``forward()``. ``loss_of(outputs, first row)`` returns the loss of a
        micro-batch, scaled so that the mean gradient over all data-parallel processes is the batch's. It is called
        where the outputs are: on the last stage of a pipeline. The resulting gradients are complete, and equal on all
        processes that hold the same part.
        """

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor | None:
        """Return the outputs of a batch in evaluation; None except on the last pipeline stage."""

    @abstractmethod
    def norm(self) -> Tensor:
        """Return the L2 norm of the whole model's gradient.

        It is a scalar, equal on all ranks, and non-finite if any gradient is.
        """

    @abstractmethod
    def clip(self, norm: Tensor, largest: float) -> None:
        """Scale the gradients down to the norm ``largest`` if ``norm``, the whole model's, is larger."""

    @abstractmethod
    def after_step(self, skip: Tensor) -> None:
        """Record that the step was taken, or skipped if ``skip``, a bool scalar on the device."""

    @abstractmethod
    def whole(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Return the whole tensors to these parts, one at a time, on rank 0.

        Collective: all ranks must iterate, though only rank 0 gets values.
        """
