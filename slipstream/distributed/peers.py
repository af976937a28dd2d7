"""A process group beside the training's, over the same ranks, to exchange small objects and flags."""

from __future__ import annotations

import socket
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """This process's rank, and a gloo group for one thread of every rank; ``group`` is None for a single process.

    Each thread has a group of its own because a collective of a background thread and one of the step loop on the same
    group could be matched with each other, which deadlocks both.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None
    #: The last question of :meth:`any`, kept until the next one, because to give up a collective right after it has
    #: ended takes a millisecond.
    _asked: deque[Any] = field(default_factory=lambda: deque(maxlen=1), repr=False, compare=False)

    @classmethod
    def connect(cls, timeout: timedelta) -> Peers:
        """Create the group; all ranks must call this. Without an initialised process group it is a single process."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, *here: bool) -> Callable[[], list[bool]]:
        """Begin to ask of each of these whether it holds on any rank; the returned function waits for the answers.
        Unlike :meth:`gather` it exchanges no pickles."""
        if self.group is None:
            return lambda: list(here)
        found = torch.tensor(here, dtype=torch.uint8)
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._asked.append(work)

        def answer() -> list[bool]:
            work.wait()
            return [bool(each) for each in found]

        return answer

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def neighbours(self) -> list[int]:
        """The ranks with the same temporary directory as this rank, itself included: those of its machine or pod."""
        status = Path(tempfile.gettempdir()).stat()
        places = self.gather((socket.gethostname(), status.st_dev, status.st_ino))
        return [rank for rank, place in enumerate(places) if place == places[self.rank]]
