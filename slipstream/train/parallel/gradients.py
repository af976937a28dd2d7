"""The gradient of the whole model, of which each process holds a part: one norm and one verdict for all.

Torch's ``clip_grad_norm_`` clips each stage of a pipeline by itself, and cannot add up tensors of different meshes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from slipstream.train.parallel.layout import Layout

#: Added to the norm by which gradients are divided, as in ``torch.nn.utils.clip_grad_norm_``.
EPSILON = 1e-6


@torch.no_grad()
def settle(parameters: Sequence[nn.Parameter], layout: Layout) -> None:
    """Add up the gradients of which each device of a tensor-parallel group holds a summand (those of normalisations,
    each device having seen a part of the sequence or of the heads), in one all-reduce."""
    partial = [p for p in parameters if isinstance(p.grad, DTensor) and Partial() in p.grad.placements]
    if not partial or layout.mesh is None:
        return
    parts = [local(p.grad) for p in partial]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=layout.mesh["tensor"].get_group())
    for parameter, part, summed in zip(partial, parts, flat.split([part.numel() for part in parts]), strict=True):
        assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
        parameter.grad = DTensor.from_local(
            summed.view_as(part), parameter.device_mesh, parameter.placements, run_check=False
        )


@torch.no_grad()
def total_norm(parameters: Sequence[nn.Parameter], layout: Layout, counted_elsewhere: Sequence[Tensor] = ()) -> Tensor:
    """The L2 norm of the gradient of the whole model: float64, a scalar on the layout's device, equal on all ranks.

    It is not finite if any gradient on any rank is not. Each element counts once: on the first of the processes that
    hold it. ``counted_elsewhere`` are parameters of which another stage of the pipeline counts the gradient.
    """
    skipped = {id(parameter) for parameter in counted_elsewhere}
    grads = [
        local(p.grad) for p in parameters if p.grad is not None and id(p) not in skipped and counts(p.grad, layout)
    ]
    device = layout.mesh.device_type if layout.mesh is not None else "cpu"
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        # Squared in float64, where no float32 overflows.
        squares += torch.stack(torch._foreach_norm(grads)).double().square().sum().to(device)
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale the gradients down to the norm ``largest`` if that of the whole model, ``norm``, is larger."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    factor = (largest / (norm + EPSILON)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device, grad.dtype))


def counts(grad: Tensor, layout: Layout) -> bool:
    """Whether this process is the first of those that hold the same elements."""
    divided: set[str] = set()
    if isinstance(grad, DTensor):
        names = grad.device_mesh.mesh_dim_names or ()
        divided = {name for name, placed in zip(names, grad.placements, strict=True) if not placed.is_replicate()}
    return all(layout.place(name) == 0 for name in ("replicate", "shard", "tensor") if name not in divided)


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
