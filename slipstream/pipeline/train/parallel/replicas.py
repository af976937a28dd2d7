"""Model replicated on every rank, with DDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from slipstream.pipeline.train.checkpoint.state import StateDict
from slipstream.pipeline.train.data_order import rank_slice
from slipstream.pipeline.train.loop.probe import ROWS, ModelTraits, running_statistics, unchanged_after
from slipstream.pipeline.train.parallel.compiled import CompiledTraining
from slipstream.pipeline.train.parallel.config import GradientsConfig
from slipstream.pipeline.train.parallel.layout import Forward, LossOf, ParallelModel, documents_of
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import SOMETIMES_UNUSED
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.torch_versions import wrap_in_ddp
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.models.initial.drawn import InitialValues
from slipstream.shared.models.trained import Weights

# Gradients are sent as low-rank factors, and the error is added to the next gradient (Vogels, Karimireddy, Jaggi 2019,
# algorithms 1 and 2).
LOG = logger("train")

# PyTorch's own hook starts the collectives of a bucket in callbacks. Over gloo, collectives of several buckets then
# start in a different order on each rank and do not match. It also has no state for checkpoints. Here a bucket's two
# all-reduces end before the next bucket's start. On a GPU all-reduces and matmuls overlap the backward pass on a
# separate stream.


@dataclass(frozen=True)
class GradientShape:
    """Gradient of a parameter as a matrix ``rows`` x ``columns``; ``rank`` 0 means uncompressed."""

    rows: int
    columns: int
    rank: int

    @classmethod
    def of(cls, gradient: Tensor, rank: int) -> GradientShape:
        """Return the shape of a gradient; ``rank`` is 0 unless the factors are smaller than the matrix."""
        rows = gradient.shape[0] if gradient.ndim > 1 else 1
        columns = gradient.numel() // max(1, rows)
        rank = min(rank, rows, columns)
        return cls(rows, columns, rank if (rows + columns) * rank < rows * columns else 0)


class BucketState:
    """State of a DDP bucket between steps; ``next`` replaces it unless the step is skipped."""

    def __init__(self, gradients: list[Tensor], rank: int, generator: torch.Generator) -> None:
        self.shapes = [GradientShape.of(gradient, rank) for gradient in gradients]
        dtype, device = gradients[0].dtype, gradients[0].device
        compressed = [shape for shape in self.shapes if shape.rank]
        #: Compression errors of all compressed gradients, flat.
        self.error = torch.zeros(sum(shape.rows * shape.columns for shape in compressed), dtype=dtype, device=device)
        q = torch.randn(sum(shape.columns * shape.rank for shape in compressed), generator=generator)
        #: Right factors of all compressed gradients, flat; equal on all ranks.
        self.q = q.to(device, dtype)
        self.next: tuple[Tensor, Tensor] | None = None

    def advance(self, skip: Tensor) -> None:
        if self.next is not None:
            for old, new in zip((self.error, self.q), self.next, strict=True):
                old.copy_(torch.where(skip, old, new))
        self.next = None


def completed_future(flat: Tensor) -> Future[Tensor]:
    """Return a completed future for DDP; its consumer waits for the current CUDA stream."""
    done: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else [])
    done.set_result(flat)
    return done


class PowerSGD:
    """Communication hook of ``DistributedDataParallel`` with state for checkpoints.

    Before the first step, run one backward pass whose gradients are discarded: it only records the buckets' shapes.
    """

    def __init__(self, rank: int, seed: int, group: RankContext) -> None:
        self._rank = rank
        self._group = group
        self._generator = torch.Generator().manual_seed(seed)
        self._buckets: dict[int, BucketState] = {}
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None

    def __call__(self, bucket: dist.GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        if bucket.index() not in self._buckets:
            self._buckets[bucket.index()] = BucketState(bucket.gradients(), self._rank, self._generator)
            return completed_future(flat)
        if self._stream:
            # Wait until the backward pass has produced the gradients, and until the last step has updated the state.
            self._stream.wait_stream(torch.cuda.current_stream(self._group.device))
        with torch.cuda.stream(self._stream):  # None on a CPU: no effect
            self._exchange(self._buckets[bucket.index()], bucket.gradients())
            # On this stream: DDP's stream waits for its current work before using the gradients.
            return completed_future(flat)

    def _exchange(self, memory: BucketState, gradients: list[Tensor]) -> None:
        """Replace the gradients by approximations of their means over all ranks."""
        pairs = list(zip(memory.shapes, gradients, strict=True))
        compressed = [(shape, gradient) for shape, gradient in pairs if shape.rank]
        plain = [gradient for shape, gradient in pairs if not shape.rank]
        sizes = [shape.rows * shape.columns for shape, _ in compressed]
        error = torch.empty_like(memory.error)
        errors = [part.view(s.rows, s.columns) for (s, _), part in zip(compressed, error.split(sizes), strict=True)]
        for (shape, gradient), mine, left in zip(compressed, errors, memory.error.split(sizes), strict=True):
            torch.add(gradient.view(shape.rows, shape.columns), left.view(shape.rows, shape.columns), out=mine)
        columns = memory.q.split([shape.columns * shape.rank for shape, _ in compressed])
        qs = [part.view(shape.columns, shape.rank) for (shape, _), part in zip(compressed, columns, strict=True)]
        ps = self._means([*(mine @ q for mine, q in zip(errors, qs, strict=True)), *plain])
        for gradient, mean in zip(plain, ps[len(compressed) :], strict=True):
            gradient.copy_(mean)
        # Orthogonalise by Householder reflections, which give a basis even for a zero matrix.
        ps = [torch.linalg.qr(p).Q for p in ps[: len(compressed)]]
        qs = self._means([mine.T @ p for mine, p in zip(errors, ps, strict=True)])
        for (_, gradient), mine, p, q in zip(compressed, errors, ps, qs, strict=True):
            product = p @ q.T
            gradient.copy_(product.view_as(gradient))
            mine.sub_(product)
        memory.next = error, torch.cat([q.reshape(-1) for q in qs]) if qs else memory.q

    def _means(self, mine: list[Tensor]) -> list[Tensor]:
        """Return the tensors' means over all ranks, with one all-reduce."""
        if not mine:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in mine])
        dist.all_reduce(flat)
        flat /= self._group.world
        parts = flat.split([tensor.numel() for tensor in mine])
        return [part.view_as(tensor) for part, tensor in zip(parts, mine, strict=True)]

    def after_step(self, skip: Tensor) -> None:
        """Adopt the errors and factors of the last step unless ``skip``, a bool scalar on the device."""
        for memory in self._buckets.values():
            memory.advance(skip)

    def state_dict(self) -> StateDict:
        """Return the state, with this rank's errors under its rank number."""
        buckets = {str(index): memory for index, memory in self._buckets.items()}
        return {
            "world": self._group.world,
            "q": {index: memory.q for index, memory in buckets.items()},
            "error": {str(self._group.rank): {index: memory.error for index, memory in buckets.items()}},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Load the state; if the number of ranks differs, reset the errors to 0."""
        same_world = state["world"] == self._group.world
        if not same_world and self._group.rank == 0:
            LOG.warning(
                "PowerSGD starts without the error of its last step, which belongs to %d processes", state["world"]
            )
        errors = state["error"].get(str(self._group.rank), {})
        for index, memory in self._buckets.items():
            memory.q.copy_(state["q"][str(index)])
            memory.error.copy_(errors[str(index)] if same_world else torch.zeros_like(memory.error))


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
        self,
        inputs: Sequence[Tensor],
        pieces: Sequence[slice],
        loss_of: LossOf,
        forward: Forward = nullcontext,
        documents: Tensor | None = None,
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
                    outputs = model(*rows, **documents_of(documents, index))
                loss_of(outputs, piece.start).backward()

    def forward(self, *inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.model(*inputs, **documents_of(documents, 0))

    @torch.no_grad()
    def fill(self, values: InitialValues, *, own: bool) -> None:
        this = dist.get_rank() if self.ddp else 0
        for name, parameter, rank, rows in self._parts_to_fill(own):
            if rank == this:
                offsets = (rows.start, *(0,) * (parameter.ndim - 1)) if parameter.ndim else ()
                values.fill(parameter[rows] if parameter.ndim else parameter, name, parameter.shape, offsets)

    @torch.no_grad()
    def share_filled(self, *, own: bool) -> None:
        # Processors of other kinds may round a drawn value differently, so no value is drawn by two ranks.
        for _, parameter, rank, rows in self._parts_to_fill(own) if self.ddp else ():
            dist.broadcast(parameter[rows] if parameter.ndim else parameter, src=rank)

    def _parts_to_fill(self, own: bool) -> Iterator[tuple[str, nn.Parameter, int, slice]]:
        """Yield names, parameters, and the ranks that fill rows of them; a scalar is one row."""
        world = dist.get_world_size() if self.ddp else 1
        for name, parameter in self.model.network.named_parameters():
            count = len(parameter) if parameter.ndim else 1
            for rank in range(world) if self.model.owns(name) is own else ():
                rows = rank_slice(rank, world, count)
                if rows.stop > rows.start:
                    yield name, parameter, rank, rows

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
        self,
        inputs: Sequence[Tensor],
        pieces: Sequence[slice],
        loss_of: LossOf,
        forward: Forward = nullcontext,
        documents: Tensor | None = None,
    ) -> None:
        super().accumulate(inputs, pieces, loss_of, forward, documents)
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
    run the blocks of ``compiled``, if given. Instead of DDP's broadcast of all buffers before every forward pass,
    :func:`~slipstream.pipeline.train.loop.step.broadcast_buffers` broadcasts only buffers that change.
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
    documents = documents_of(compiled.documents, 0) if compiled else {}

    def pass_over_zeros() -> None:
        with unchanged_after(model):
            with context(), blocks():
                outputs = ddp(*inputs, **documents)
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
