"""PowerSGD: low-rank gradient compression with error feedback and warm start.

Gradients are sent as low-rank factors, and the error is added to the next gradient (Vogels, Karimireddy, Jaggi 2019,
algorithms 1 and 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from slipstream.pipeline.train.checkpoint.state import StateDict
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.logs import logger

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
