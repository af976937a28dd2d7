"""What the loop knows of a model that several processes train: one interface, however it is divided among them."""

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

#: The loss of a micro-batch's outputs, given the place of its first row in the batch.
LossOf = Callable[[Tensor, int], Tensor]
#: Makes the context in which a forward pass runs.
Forward = Callable[[], AbstractContextManager[object]]


class ParallelModel(ABC):
    """What this process holds of a model, and the passes through it. All ranks call every method equally often."""

    #: The parameters that this process holds, by the names of the whole model.
    model: Predictor
    #: What it runs: the model, or the stages of a pipeline.
    model_parts: Sequence[Predictor]
    #: The only number of rows that :meth:`forward` takes; 0 if it takes any.
    batch_rows: int = 0
    #: Whether this process is the first of those that compute the losses of the same rows.
    counts_losses: bool = True
    #: Whether this process holds the whole model, and so can try rows without the others.
    is_whole: bool = False
    #: What else a checkpoint has to hold, by name.
    parts: Mapping[str, Stateful] = MappingProxyType({})
    #: The context in which passes of training are compiled, if they are; beside that of the caller.
    compiled: Forward = nullcontext

    @abstractmethod
    def sharing_rows(self, group: Group) -> Group:
        """This process's place among those that divide a batch's rows among themselves."""

    @abstractmethod
    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        """Add the gradients of all micro-batches ``pieces`` of the batch ``inputs``, whose forward passes run in the
        context ``forward()``.

        ``loss_of(outputs, first row)`` gives the loss of a micro-batch, scaled so that the mean of the gradients of all
        data-parallel processes is that of the batch. It is called where the outputs are: on the last stage of a
        pipeline. The gradients are whole, and alike on all processes that hold the same part.
        """

    @abstractmethod
    def forward(self, *inputs: Tensor) -> Tensor | None:
        """The outputs of a batch, in evaluation; None on all stages of a pipeline but the last."""

    @abstractmethod
    def norm(self) -> Tensor:
        """The L2 norm of the gradient of the whole model: a scalar, equal on all ranks, and not finite if any gradient
        is not."""

    @abstractmethod
    def clip(self, norm: Tensor, largest: float) -> None:
        """Scale the gradients down to the norm ``largest`` if that of the whole model, ``norm``, is larger."""

    @abstractmethod
    def after_step(self, skip: Tensor) -> None:
        """The step of this gradient is taken, or skipped: bool, a scalar on the device."""

    @abstractmethod
    def whole(self, tensors: Mapping[str, Tensor]) -> Weights:
        """The whole tensors of which these are this process's parts, one at a time, on rank 0. All ranks must take
        them, though the others get none."""
