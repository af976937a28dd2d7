"""The ranks of a run as checkpointing sees them: who we are, and telling each other small things."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """This process among its peers. ``group`` is a gloo group of its own, or None when there is only one process.

    Its own, because a collective of the background thread that met one of the step loop would deadlock both.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None

    @classmethod
    def meet(cls, timeout: timedelta) -> Peers:
        """Form the group; all ranks must call it. Without a process group it is a world of one."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))

    def gather(self, value: Any) -> list[Any]:
        """What every rank said, in their order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """What rank 0 said, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def leader(self) -> int:
        """The lowest rank that shares this rank's temporary directory: one per machine or pod."""
        status = Path(tempfile.gettempdir()).stat()
        places = self.gather((socket.gethostname(), status.st_dev, status.st_ino))
        return places.index(places[self.rank])
