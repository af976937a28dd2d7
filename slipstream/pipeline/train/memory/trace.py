"""Memory trace of one training step on fake tensors: bytes between steps, and peak, of a process.

The model is built without memory, divided by the training's own code in a fake process group, and run by the training's
own step. The second step is measured: the first creates the optimiser state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.documents import MOST_DOCUMENTS, document_layout
from slipstream.pipeline.train.loop.optimizer import AveragedWeights, make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.memory.tracker import Kind, MemoryTracker, cuda_operators
from slipstream.pipeline.train.parallel.compiled import recompute_blocks
from slipstream.pipeline.train.parallel.config import GradientsConfig
from slipstream.pipeline.train.parallel.divide import DividedModel, model_parts
from slipstream.pipeline.train.parallel.layout import Forward, Layout, LossOf, ParallelModel, check_plan
from slipstream.pipeline.train.parallel.pipeline import Pipeline
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel, uses_ddp
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.artifacts.prepared.token_rows import read_tokens
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.errors import UserError
from slipstream.shared.machine.torch_versions import shapes_known_to_pipelines
from slipstream.shared.models.adapters.network import hold_frozen
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model, zero_inputs
from slipstream.shared.models.plan import model_plan

CPU = torch.device("cpu")
#: Number of micro-batches to trace: a step of equal micro-batches reaches its peak by the second.
TELLING = 2
#: Gradient dtypes of the communication hooks.
COMPRESSED = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TracedStep:
    """Step of process ``rank`` of ``world`` to trace, with ``micro_batches`` of ``rows`` rows each.

    The ``precision`` of ``training`` must not be "auto".
    """

    model: ModelConfig
    signature: Signature
    training: TrainingConfig
    micro_batches: int
    rows: int
    world: int = 1
    nodes: int = 1
    rank: int = 0
    #: Type of the device whose operators are traced.
    device: str = "cuda"
    #: Number of documents in a row, if attention separates them: each takes scratch in the backward pass. With more
    #: than :data:`MOST_DOCUMENTS` a mask separates them.
    documents: int = MOST_DOCUMENTS

    def of_rank(self, rank: int) -> TracedStep:
        return replace(self, rank=rank)

    @property
    def traced_micro_batches(self) -> int:
        """Number of micro-batches to trace: all for a pipeline, whose schedule depends on their number."""
        return self.micro_batches if self.training.parallel.pipeline > 1 else min(self.micro_batches, TELLING)


@dataclass(frozen=True)
class Footprint:
    """Bytes by kind of tensor: ``at_peak`` of a step, and ``lasting`` between steps."""

    at_peak: dict[Kind, int]
    lasting: dict[Kind, int]

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def trace_footprint(step: TracedStep, watching: AbstractContextManager[object] | None = None) -> Footprint:
    """Trace a step, in the context ``watching`` if given, and return its memory footprint.

    Call it in a process without a process group. Raises any error of a model that cannot be traced.
    """
    training = step.training
    if training.parallel.offload:
        raise UserError("training.parallel.offload: the trace cannot separate host memory from device memory")
    if training.gradients.hook == "powersgd" and step.world > 1:
        raise UserError(
            "training.gradients.hook: powersgd works on the memory of gradients, which a trace does not have"
        )
    with exchanging_nothing(step):
        model = build_model(step.model, step.signature, 0, shapes_alone=True)
        if model.adapted:
            hold_frozen(model.network, training.precision)
        if training.recompute == "full":
            recompute_blocks(model.network)
        check_plan(training.parallel, model_plan(model.network), step.micro_batches, adapted=model.adapted)
        layout = Layout.connect(training.parallel, step.rank, step.world, CPU)
        divides = training.parallel.divides
        parts = model_parts(model, layout, training.precision) if divides else [model]
        tracker = MemoryTracker(deterministic=training.deterministic)
        its_operators = cuda_operators() if step.device == "cuda" else nullcontext()
        with FakeTensorMode(allow_non_fake_inputs=True), tracker, its_operators:
            with tracker.making("parameters"):
                for part in parts:
                    part.to_empty(device=CPU)
            parallel = divided(parts, layout, step, tracker) if divides else undivided(model, step, tracker)
            # GPUs that compute in bf16 have both kernels.
            modern = step.device == "cuda" and training.precision == "bf16"
            state = begun(parallel, training, tracker, fused_loss=modern and training.kernels == "auto")
            group = parallel.sharing_rows(RankContext(step.rank, step.world, CPU, "fake"))

            def run(step: TracedStep) -> None:
                number = step.traced_micro_batches
                documents = document_layout(parts[0], step.rows, number, kernel=modern)
                batch = zero_batch(step.signature, number * step.rows, group)
                if documents and step.documents <= MOST_DOCUMENTS:
                    batch = batch._replace(documents=documents.whole_rows(step.documents))
                numbered = replace(training, accumulation=number)
                train_step(state, numbered, group, training.precision, batch, total_steps=2)

            # A pipeline takes only batches with all micro-batches.
            run(step if training.parallel.pipeline > 1 else replace(step, micro_batches=1))
            tracker.restart()
            with watching or nullcontext():
                run(step)
            unseen = (step.micro_batches - step.traced_micro_batches) * step.rows * step.signature.record.itemsize
            at_peak = {**tracker.at_peak, "activations": tracker.at_peak["activations"] + unseen}
            return Footprint(at_peak, dict(tracker.held))


@contextmanager
def exchanging_nothing(step: TracedStep) -> Iterator[None]:
    """Provide a fake process group, whose collectives transfer nothing."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(step.world // step.nodes)
    exchange = schedules._batch_p2p
    schedules._batch_p2p = lambda operations, desc=None: [PendingSend(each.tensor) for each in operations]  # type: ignore
    dist.init_process_group("fake", rank=step.rank, world_size=step.world, store=dist.HashStore())
    try:
        with shapes_known_to_pipelines():
            yield
    finally:
        dist.destroy_process_group()
        schedules._batch_p2p = exchange
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


class PendingSend:
    """Handle of a pipeline's send that keeps the tensor alive, as an actual send does.

    An interleaved schedule waits for sends at the step's end.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        """Return at once, because nothing is transferred."""


def divided(parts: list[Predictor], layout: Layout, step: TracedStep, tracker: MemoryTracker) -> ParallelModel:
    pipeline = None
    if layout.config.pipeline > 1:
        with tracker.making("communication"):
            pipeline = Pipeline(parts, layout, CPU, step.micro_batches, step.rows, step.training.precision)
    label_gradients(parts, tracker)
    return LabelledModel(parts, layout, pipeline, tracker)


class LabelledModel(DividedModel):
    """Divided model that also labels the unsharded gradients that FSDP2 keeps between micro-batches."""

    def __init__(
        self, parts: list[Predictor], layout: Layout, pipeline: Pipeline | None, tracker: MemoryTracker
    ) -> None:
        super().__init__(parts, layout, pipeline)
        self._tracker = tracker

    def accumulate(
        self,
        inputs: Sequence[Tensor],
        pieces: Sequence[slice],
        loss_of: LossOf,
        forward: Forward = nullcontext,
        documents: Tensor | None = None,
    ) -> None:
        def loss_and_labels(outputs: Tensor, first: int) -> Tensor:
            self._tracker.relabel(self._whole_gradients(), "gradients")
            return loss_of(outputs, first)

        super().accumulate(inputs, pieces, loss_and_labels, forward, documents)

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
                for parameter in group.fsdp_params:
                    yield parameter.unsharded_accumulated_grad
                    if hasattr(parameter, "_unsharded_param"):
                        yield parameter._unsharded_param.grad


def traits_without_values(model: nn.Module) -> ModelTraits:
    """Return traits that need no tensor values; only batch normalisation counts as changing buffers."""
    normalisations = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    changing = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in normalisations]
    return ModelTraits(changing=tuple(changing), has_batch_statistics=bool(normalisations))


class BucketedModel(ReplicatedModel):
    """Replica that copies gradients to buckets in the last micro-batch, like DDP.

    DDP cannot run on fake tensors, because its C++ code accesses their memory.
    """

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
        self,
        inputs: Sequence[Tensor],
        pieces: Sequence[slice],
        loss_of: LossOf,
        forward: Forward = nullcontext,
        documents: Tensor | None = None,
    ) -> None:
        for index, piece in enumerate(pieces):
            self._reduces = index == len(pieces) - 1
            mine = None if documents is None else documents[index : index + 1]
            super().accumulate(inputs, [piece], loss_of, forward, mine)
        self._sent.clear()


def undivided(model: Predictor, step: TracedStep, tracker: MemoryTracker) -> ParallelModel:
    traits = traits_without_values(model)
    label_gradients([model], tracker)
    if not uses_ddp(step.world, step.training.gradients):
        return ReplicatedModel(model, traits)
    return BucketedModel(model, traits, step.training.gradients, tracker)


def label_gradients(parts: Sequence[nn.Module], tracker: MemoryTracker) -> None:
    for part in parts:
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.relabel([p.grad], "gradients"))


def begun(
    parallel: ParallelModel, training: TrainingConfig, tracker: MemoryTracker, *, fused_loss: bool
) -> TrainingState:
    """Return the initial state of a training; its optimiser's tensors will be labelled "optimizer"."""
    with tracker.making("optimizer"):
        averaged = AveragedWeights(parallel.model, training.ema) if training.ema else None
        optimizer = make_optimizer(parallel.model, training)
    making: list[Any] = []

    def begin(*_: object) -> None:
        making.append(tracker.making("optimizer"))
        making[-1].__enter__()

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *_: making.pop().__exit__(None, None, None))
    traits = traits_without_values(parallel.model)
    scaler = LossScaler(CPU, enabled=training.precision == "fp16")
    return TrainingState(parallel, optimizer, scaler, {}, Progress(), traits, averaged, fused_loss=fused_loss)


def zero_batch(signature: Signature, rows: int, group: RankContext) -> Batch:
    """Build one rank's batch of ``rows`` zero rows, with as many rows on every rank of ``group``."""
    inputs = tuple(zero_inputs(signature, rows))
    labels = (torch.zeros(rows, *spec.shape, dtype=getattr(torch, spec.dtype)) for spec in signature.labels)
    target, *weight = labels
    if signature.task == "next token":
        inputs, target = tuple(read_tokens(each)[0] for each in inputs), read_tokens(target)[1]
    return Batch(inputs, target, rows, rows * group.world, 0, 0.0, *weight)
