"""Places among the processes of a job on CPUs; no process group need exist."""

import torch

from slipstream.shared.distributed.process_group import RankContext


def on_cpu(rank: int, world: int) -> RankContext:
    return RankContext(rank, world, torch.device("cpu"), "gloo")


ALONE = on_cpu(0, 1)
