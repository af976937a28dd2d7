"""Memory of DDP's gradient buckets on a replicated model.

DDP cannot run on fake tensors, because its C++ code accesses their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from slipstream.models.factory import Predictor
from slipstream.train.loop.probe import ModelTraits
from slipstream.train.memory.tracker import MemoryTracker
from slipstream.train.parallel.config import GradientsConfig
from slipstream.train.parallel.model import Forward, LossOf
from slipstream.train.parallel.replicas import ReplicatedModel

#: Gradient dtypes of the communication hooks.
COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}


class BucketedModel(ReplicatedModel):
    """Replica that copies gradients to buckets in the last micro-batch, like DDP."""

    def __init__(
        self, model: Predictor, traits: ModelTraits, settings: GradientsConfig, tracker: MemoryTracker
    ) -> None:
        super().__init__(model, traits)
        self._reduces = False
        self._sent: list[Tensor] = []
        self._compressed = COMPRESSED.get(settings.hook)
        trained = [p for p in model.parameters() if p.requires_grad]
        views = settings.gradient_as_bucket_view
        with tracker.making("gradients" if views else "communication"):
            buckets = [torch.empty_like(parameter, requires_grad=False) for parameter in trained]
        for parameter, bucket in zip(trained, buckets, strict=True):

            def reduce(parameter: nn.Parameter, bucket: Tensor = bucket) -> None:
                if not self._reduces:
                    return
                if self._compressed:
                    self._sent.append(bucket.to(self._compressed))
                if views:
                    parameter.grad = bucket

            parameter.register_post_accumulate_grad_hook(reduce)

    def accumulate(
        self, inputs: Sequence[Tensor], pieces: Sequence[slice], loss_of: LossOf, forward: Forward = nullcontext
    ) -> None:
        for index, piece in enumerate(pieces):
            self._reduces = index == len(pieces) - 1
            super().accumulate(inputs, [piece], loss_of, forward)
        self._sent.clear()
