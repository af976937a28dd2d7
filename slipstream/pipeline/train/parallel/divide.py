"""Model divided by a layout: its parts on this process, passes, and gradient norm.

Torch's ``clip_grad_norm_`` clips pipeline stages separately, and cannot combine tensors of different meshes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slipstream.pipeline.train.checkpoint.staging import local_tensor
from slipstream.pipeline.train.device_clock import wait_for
from slipstream.pipeline.train.parallel.layout import (
    DATA,
    Forward,
    Layout,
    LossOf,
    ParallelModel,
    check_plan,
    documents_of,
)
from slipstream.pipeline.train.parallel.pipeline import Pipeline, cut_stages, stated_plan
from slipstream.pipeline.train.parallel.sharding import divide_tensors, prepare_passes, shard_parameters
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.initial.drawn import InitialValues, allocate_zeros
from slipstream.shared.models.plan import model_plan
from slipstream.shared.models.trained import TensorType, Weights, in_file_order

#: Number added to the norm before dividing by it, as in ``torch.nn.utils.clip_grad_norm_``.
EPSILON = 1e-6


@torch.no_grad()
def sum_partial_gradients(parameters: Sequence[nn.Parameter], layout: Layout) -> None:
    """All-reduce gradients with a ``Partial`` placement within the tensor-parallel group, in one call.

    They belong to normalisation layers: every device has processed a part of the sequence or of the heads.
    """
    partial = [p for p in parameters if isinstance(p.grad, DTensor) and Partial() in p.grad.placements]
    if not partial or layout.mesh is None:
        return
    parts = [local_tensor(p.grad) for p in partial if p.grad is not None]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=layout.mesh.get_group("tensor"))
    for parameter, part, summed in zip(partial, parts, flat.split([part.numel() for part in parts]), strict=True):
        assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
        parameter.grad = DTensor.from_local(
            summed.view_as(part), parameter.device_mesh, parameter.placements, run_check=False
        )


@torch.no_grad()
def total_norm(parameters: Sequence[nn.Parameter], layout: Layout, counted_elsewhere: Sequence[Tensor] = ()) -> Tensor:
    """Return the L2 norm of the whole model's gradient: a float64 scalar, equal on all ranks.

    It is on the layout's device, non-finite if any rank's gradient is. Every element counts once, on the first process
    that holds it. Gradients of ``counted_elsewhere`` are counted by another pipeline stage.
    """
    skipped = {id(parameter) for parameter in counted_elsewhere}
    grads = [
        local_tensor(p.grad)
        for p in parameters
        if p.grad is not None and id(p) not in skipped and counts_gradient(p.grad, layout)
    ]
    device = layout.mesh.device_type if layout.mesh is not None else "cpu"
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        # Squares in float64, because float32 may overflow.
        squares += torch.stack(torch._foreach_norm(grads)).double().square().sum().to(device)
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale the gradients down to norm ``largest`` if ``norm``, of the whole model's gradient, is larger."""
    factor = (largest / (norm + EPSILON)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in (local_tensor(p.grad) for p in parameters if p.grad is not None):
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for kind, grads in alike.items():
        torch._foreach_mul_(grads, factor.to(*kind))


def counts_gradient(grad: Tensor, layout: Layout) -> bool:
    """Return True if this process is the first that holds the elements of ``grad``."""
    divided: set[str] = set()
    if isinstance(grad, DTensor):
        names = grad.device_mesh.mesh_dim_names or ()
        divided = {name for name, placed in zip(names, grad.placements, strict=True) if not placed.is_replicate()}
    return all(layout.coordinate(name) == 0 for name in ("replicate", "shard", "tensor") if name not in divided)


class DividedModel(ParallelModel):
    """This process's parts of a model divided by a layout."""

    def __init__(self, parts: list[Predictor], layout: Layout, pipeline: Pipeline | None) -> None:
        self.model_parts = parts
        self._layout = layout
        self._pipeline = pipeline
        self.model = parts[0] if len(parts) == 1 else JoinedParts(parts)
        self._parameters = list(self.model.parameters())
        self.batch_rows = pipeline.rows if pipeline else 0
        self.clips_in_step = layout.size("tensor") == 1
        self.counts_losses = layout.has_losses and layout.coordinate("tensor") == 0

    def sharing_rows(self, group: RankContext) -> RankContext:
        return replace(group, rank=self._layout.data_rank, world=self._layout.data_size)

    def accumulate(
        self,
        inputs: Sequence[Tensor],
        pieces: Sequence[slice],
        loss_of: LossOf,
        forward: Forward = nullcontext,
        documents: Tensor | None = None,
    ) -> None:
        if self._pipeline:
            # Forward and backward passes alternate, so both run in the context.
            with forward(), self.compiled():
                self._pipeline.step(inputs, loss_of, documents)
        else:
            (model,) = self.model_parts
            for index, piece in enumerate(pieces):
                if isinstance(model, FSDPModule):
                    prepare_passes(model, self._layout.config, last=piece == pieces[-1])
                with self.compiled():
                    with forward():
                        outputs = model(*(x[piece] for x in inputs), **documents_of(documents, index))
                    loss_of(outputs, piece.start).backward()
        sum_partial_gradients(self._parameters, self._layout)

    @torch.no_grad()
    def forward(self, *inputs: Tensor, documents: Tensor | None = None) -> Tensor | None:
        if self._pipeline:
            outputs = self._pipeline.outputs(inputs, documents)
        else:
            outputs = self.model_parts[0](*inputs, **documents_of(documents, 0))
        # FSDP leaves some weights gathered for a backward pass, which does not follow here.
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()
        return outputs

    def fill(self, values: InitialValues, *, own: bool) -> None:
        for part in self.model_parts:
            fill_weights(part, values, own=own)

    def share_filled(self, *, own: bool) -> None:
        """Do nothing, because every rank fills all that it holds."""

    def norm(self) -> Tensor:
        shared = self._pipeline.counted_elsewhere if self._pipeline else []
        norm = total_norm(self._parameters, self._layout, shared)
        # An optimiser on the host would not wait for a value still in transfer from the device.
        return norm.cpu() if self._layout.config.offload else norm

    def clip(self, norm: Tensor, largest: float) -> None:
        clip_gradients(self._parameters, norm, largest)

    def after_step(self, skip: Tensor) -> None:
        """Do nothing, because no state here depends on skipped steps."""

    def whole(self, tensors: Mapping[str, Tensor]) -> Weights:
        mine = {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        gathered: list[dict[str, TensorType]] = [{} for _ in range(self._layout.world)]
        dist.all_gather_object(gathered, mine)
        kinds = {name: TensorType(*kind) for one in gathered for name, kind in one.items()}
        holders = {name: next(rank for rank, one in enumerate(gathered) if name in one) for name in kinds}
        return Weights(kinds, lambda: self._one_by_one(tensors, kinds, holders))

    @torch.no_grad()
    def _one_by_one(
        self, tensors: Mapping[str, Tensor], kinds: Mapping[str, TensorType], holders: Mapping[str, int]
    ) -> Iterator[Tensor]:
        """Yield all tensors, gathered on their holders and sent to rank 0; other ranks yield nothing."""
        assert self._layout.mesh is not None
        # Torch warns that a tensor divided twice takes two gathers.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        device, rank = self._layout.mesh.device_type, self._layout.rank
        for name in in_file_order(kinds):
            whole = torch.empty(0)
            if name in tensors:
                part = tensors[name].to(device)
                whole = part.full_tensor() if isinstance(part, DTensor) else part
            if holders[name] and rank == holders[name]:
                dist.send(whole, 0)
            elif holders[name] and rank == 0:
                whole = torch.empty(kinds[name].shape, dtype=kinds[name].dtype, device=device)
                dist.recv(whole, holders[name])
            if rank == 0:
                yield whole
            else:
                # Otherwise this process would start all later collectives, which have timeouts, long before rank 0.
                wait_until_computed(whole)


def wait_until_computed(tensor: Tensor) -> None:
    if tensor.is_cuda:
        wait_for(torch.cuda.current_stream(tensor.device))


class JoinedParts(Predictor):
    """Parameters of several pipeline stages under the whole model's names, without a forward pass."""

    def __init__(self, parts: list[Predictor]) -> None:
        super().__init__(parts[0].signature, nn.Module())
        self.row_bytes, self.adapted = parts[0].row_bytes, parts[0].adapted
        self._stages = tuple(parts)  # in a tuple, so that torch does not register them
        for part in parts:
            for prefix, module in part.network.named_modules():
                holder = self.network
                for step in prefix.split(".") if prefix else ():
                    if step not in holder._modules:
                        holder.add_module(step, nn.Module())
                    holder = holder.get_submodule(step)
                holder._parameters.update(module._parameters)
                holder._buffers.update(module._buffers)
                holder._non_persistent_buffers_set |= module._non_persistent_buffers_set

    def train(self, mode: bool = True) -> JoinedParts:
        for stage in self._stages if hasattr(self, "_stages") else ():
            stage.train(mode)
        return super().train(mode)


def divide_model(
    model: Predictor,
    layout: Layout,
    device: torch.device,
    values: InitialValues | None,
    *,
    micro_batches: int,
    rows: int,
    precision: str,
) -> DividedModel:
    """Divide ``model`` by ``layout``. Collective.

    A model on the meta device gets its initial ``values``, or zeros; every process fills only its part. The largest
    batch has ``micro_batches`` of ``rows`` rows per rank; a pipeline takes no other batches. ``precision`` is that of
    the passes' autocast. Raises ``UserError`` if the layout cannot divide the model, or for missing values.
    """
    config = layout.config
    check_plan(config, model_plan(model.network), micro_batches, adapted=model.adapted)
    parts = model_parts(model, layout, precision)
    for part in parts:
        fill_part(part, torch.device("cpu") if config.offload else device, values)
        # If these were on the host, every pass would copy them and wait.
        part.image_mean, part.image_std = part.image_mean.to(device), part.image_std.to(device)
    pipeline = Pipeline(parts, layout, device, micro_batches, rows, precision) if config.pipeline > 1 else None
    return DividedModel(parts, layout, pipeline)


def model_parts(model: Predictor, layout: Layout, precision: str) -> list[Predictor]:
    """Return this process's parts of a model whose plan allows the layout.

    Parts of a model on the meta device stay there.
    """
    assert layout.mesh is not None
    config = layout.config
    parts = cut_stages(model, layout) if config.pipeline > 1 else [model]
    for part in parts:
        if config.tensor > 1:
            divide_tensors(part.network, stated_plan(part), layout.mesh["tensor"], sequence=config.sequence)
        if config.uses_fsdp(layout.data_size):
            shard_parameters(
                part, layout.mesh[DATA] if layout.size("replicate") > 1 else layout.mesh["shard"], config, precision
            )
    return parts


def fill_part(part: Predictor, device: torch.device, values: InitialValues | None) -> None:
    """Allocate and initialise a part that is on the meta device; leave other parts unchanged."""
    if not any(parameter.is_meta for parameter in part.network.parameters()):
        return
    allocate_zeros(part.network, device)
    if values:
        fill_weights(part, values, own=False)
        fill_weights(part, values, own=True)


@torch.no_grad()
def fill_weights(part: Predictor, values: InitialValues, *, own: bool) -> None:
    """Fill the weights of a part as :meth:`.ParallelModel.fill` does."""
    for name, parameter in part.network.named_parameters():
        if part.owns(name) is not own:
            continue
        offsets: tuple[int, ...] = (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
        values.fill(local_tensor(parameter), name, parameter.shape, offsets)
