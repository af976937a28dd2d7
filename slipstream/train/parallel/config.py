"""Settings that divide training among processes."""

from __future__ import annotations

from typing import Literal

from slipstream.errors import UserError
from slipstream.settings import Natural, Positive, Settings, settings

#: Default columns of PowerSGD's matrices.
GRADIENT_RANK = 2

#: Every level divides the named state and all before it among data-parallel processes.
Shard = Literal["none", "optimizer", "gradients", "weights"]


@settings
class ParallelConfig(Settings):
    """Division of the model among processes; the remaining factor is data parallel."""

    section = "training.parallel"

    shard: Shard = "none"
    """State that data-parallel processes divide among themselves: none, the optimiser's (ZeRO-1), also the gradients
    (ZeRO-2), or also the weights (ZeRO-3)."""
    replicas: Natural = 0
    """Groups of processes that each hold all shards (hybrid sharding); 0 means one per node."""
    pipeline: Positive = 1
    """Processes that each hold some of the blocks of the model."""
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order of a pipeline's passes: with "interleaved" each process holds several stages and waits less."""
    stages_per_rank: Positive = 1
    """Stages of an interleaved pipeline on each process."""
    tensor: Positive = 1
    """Processes that divide every block among themselves."""
    sequence: bool = True
    """Let these also divide the activations between blocks along the sequence."""
    offload: bool = False
    """Keep unused shards in the host's memory."""

    def check(self) -> None:
        if self.shard == "none" and self.replicas > 1:
            raise self.reject("replicas", "0: without training.parallel.shard every process is a replica")
        if self.shard == "none" and self.offload:
            raise self.reject("offload", "false, or another training.parallel.shard than none")
        if (self.schedule == "interleaved") != (self.stages_per_rank > 1):
            expected = "at least 2 for an interleaved schedule" if self.stages_per_rank == 1 else "1 for schedule 1f1b"
            raise self.reject("stages_per_rank", expected)
        if self.pipeline == 1 and self.stages_per_rank > 1:
            raise self.reject("stages_per_rank", "1 without training.parallel.pipeline")

    @property
    def divides(self) -> bool:
        """True if anything is divided; otherwise every process holds the whole model (DDP)."""
        return self.shard != "none" or self.pipeline > 1 or self.tensor > 1

    def uses_fsdp(self, data: int) -> bool:
        """Return True if FSDP2 manages the parameters with ``data`` data-parallel processes.

        Without ``shard`` each of them holds the only shard, as with DDP.
        """
        return self.shard != "none" or (self.divides and data > 1)

    def sizes(self, world: int, nodes: int = 1) -> tuple[int, ...]:
        """Return the mesh sizes of ``world`` processes on ``nodes`` nodes.

        They are pipeline, replicate, shard and tensor. Raises ``UserError`` if their product is not ``world``.
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
                "a divisor of that, or 0"
            )
        return self.pipeline, replicas, data // replicas, self.tensor


@settings
class GradientsConfig(Settings):
    """Gradient exchange of processes that each hold the whole model (DDP)."""

    section = "training.gradients"

    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of exchanged gradients: none, 16-bit values, or a product of thin matrices (PowerSGD). All but
    "none" change the numbers."""
    rank: Positive = GRADIENT_RANK
    """Maximum number of columns of PowerSGD's matrices: more are more exact and take more bytes."""
    bucket_cap_mb: Natural = 0
    """Megabytes of gradients that are reduced at once; 0 leaves it to PyTorch: 25, and 1 for the first."""
    gradient_as_bucket_view: bool = True
    """Keep gradients in the buckets that are reduced, instead of copying them back."""
    static_graph: bool = False
    """Let PyTorch assume that the same parameters take part in every batch."""

    def check(self) -> None:
        if self.rank != GRADIENT_RANK and self.hook != "powersgd":
            raise self.reject("rank", f"{GRADIENT_RANK}, or training.gradients.hook powersgd")
