"""Settings that divide training among processes."""

from __future__ import annotations

from typing import Annotated, Literal

from slipstream.shared.errors import UserError
from slipstream.shared.settings import Natural, Positive, Settings, settings
from slipstream.shared.spelling import NO_NUMBER, NONE

#: Default rank of PowerSGD's low-rank factors.
GRADIENT_RANK = 2

#: State that is sharded among data-parallel processes; every level includes the levels before it.
Shard = Literal["none", "optimizer", "gradients", "weights"]


@settings
class ParallelConfig(Settings):
    """Division of the model among processes.

    The data-parallel degree is the number of processes divided by ``pipeline * tensor``.
    """

    section = "training.parallel"

    shard: Annotated[Shard, NONE] = "none"
    """State that data-parallel processes shard: null, "optimizer" (its state, ZeRO-1), "gradients" (optimiser state
    and gradients, ZeRO-2), or "weights" (all three, ZeRO-3)."""
    replicas: Annotated[Natural, NO_NUMBER] = 0
    """Number of groups of processes that each hold all shards (hybrid sharding); null means one group per node."""
    pipeline: Positive = 1
    """Number of processes of a pipeline, each with some of the model's blocks; 1 means no pipeline."""
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Schedule of a pipeline. With "interleaved" every process holds several stages, which shortens its idle time."""
    stages_per_rank: Positive = 1
    """Number of stages on every process of an interleaved pipeline."""
    tensor: Positive = 1
    """Number of processes that divide every block (tensor parallelism); 1 means none."""
    sequence: bool = True
    """Sequence parallelism: tensor-parallel processes also divide the computation between blocks, along the
    sequence."""
    offload: bool = False
    """Keep shards in host memory while they are unused."""

    def check(self) -> None:
        if self.shard == "none" and self.replicas > 1:
            raise self.reject("replicas", "null: without training.parallel.shard every process is a replica")
        if self.shard == "none" and self.offload:
            raise self.reject("offload", "false, or a training.parallel.shard")
        if (self.schedule == "interleaved") != (self.stages_per_rank > 1):
            expected = "at least 2 for an interleaved schedule" if self.stages_per_rank == 1 else "1 for schedule 1f1b"
            raise self.reject("stages_per_rank", expected)
        if self.pipeline == 1 and self.stages_per_rank > 1:
            raise self.reject("stages_per_rank", "1 without training.parallel.pipeline")

    @property
    def divides(self) -> bool:
        """True if the model or its state is divided; otherwise every process holds all of it (DDP)."""
        return self.shard != "none" or self.pipeline > 1 or self.tensor > 1

    def uses_fsdp(self, data: int) -> bool:
        """Return True if FSDP2 manages the parameters with ``data`` data-parallel processes.

        With ``shard`` "none" it only replicates them, like DDP, and only if pipeline or tensor parallelism divides the
        model.
        """
        return self.shard != "none" or (self.divides and data > 1)

    def sizes(self, world: int, nodes: int = 1) -> tuple[int, ...]:
        """Return the mesh sizes (pipeline, replicate, shard, tensor) of ``world`` processes on ``nodes`` nodes.

        Raises ``UserError`` if the settings do not divide ``world``.
        """
        if not self.divides:
            return 1, world, 1, 1
        data, rest = divmod(world, self.pipeline * self.tensor)
        if rest:
            raise UserError(
                f"training.parallel: pipeline {self.pipeline} x tensor {self.tensor} does not divide the {world} "
                "processes; choose a product that does, or another number of processes"
            )
        if self.shard == "none":
            return self.pipeline, data, 1, self.tensor
        # Stages are on different nodes if there are enough.
        spanned = nodes // self.pipeline if nodes % self.pipeline == 0 else 1
        replicas = self.replicas or (spanned if data % spanned == 0 else 1)
        if data % replicas:
            raise UserError(
                f"training.parallel.replicas: {replicas} does not divide the {data} data-parallel processes; expected "
                "a divisor of that, or null"
            )
        return self.pipeline, replicas, data // replicas, self.tensor


def layout_in_words(parallel: ParallelConfig) -> str:
    """Return the non-default settings of the layout as text."""
    changed = {name: value for name, value in vars(parallel).items() if value != getattr(ParallelConfig(), name)}
    return " ".join(f"{name} {value}" for name, value in changed.items()) or "none"


@settings
class GradientsConfig(Settings):
    """Gradient exchange of processes that each hold the whole model (DDP)."""

    section = "training.gradients"

    hook: Annotated[Literal["none", "fp16", "bf16", "powersgd"], NONE] = "none"
    """Compression of exchanged gradients: null, "fp16" or "bf16" (half the bytes), or "powersgd" (low-rank factors).
    All but null change the results."""
    rank: Positive = GRADIENT_RANK
    """Maximum rank of PowerSGD's factors; a higher rank is more exact and sends more bytes."""
    bucket_cap_mb: Annotated[Natural, NO_NUMBER] = 0
    """Megabytes of gradients per DDP bucket, which is reduced at once; null keeps PyTorch's default: 25, and 1 for the
    first bucket."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of DDP's buckets, so that reduced gradients need not be copied back."""
    static_graph: bool = False
    """Tell DDP that the same parameters are used in every batch (its static_graph)."""

    def check(self) -> None:
        if self.rank != GRADIENT_RANK and self.hook != "powersgd":
            raise self.reject("rank", f"{GRADIENT_RANK}, or training.gradients.hook powersgd")
