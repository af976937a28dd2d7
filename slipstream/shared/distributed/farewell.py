"""Shutdown of a job whose rank 0 works longest, while the other ranks poll the store.

If they waited in a collective, NCCL's watchdog would kill them after ten minutes; writing a large model takes longer.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from slipstream.shared.distributed.user_errors import AgreedUserError

#: Seconds between polls of the store.
POLL_S = 0.2
DONE = "done"


def leave_after_rank_0(
    store: dist.Store, rank: int, world: int, refused: str = "", timeout: timedelta = timedelta(minutes=10)
) -> None:
    """Wait, without a timeout, until rank 0 has called this function, too.

    Rank 0, which may host the store, shuts down last: it waits up to ``timeout`` for all other ranks.

    If rank 0 passes a message ``refused``, because its work was refused, all ranks raise ``AgreedUserError`` with it.
    Raises ``torch.distributed.DistError`` if the store, or on rank 0 another rank, is lost.
    """
    if rank == 0:
        store.set(DONE, refused)
        store.wait([f"left/{other}" for other in range(1, world)], timeout)
    else:
        while not store.check([DONE]):
            time.sleep(POLL_S)
        refused = store.get(DONE).decode()
        store.set(f"left/{rank}", "")
    if refused:
        raise AgreedUserError(refused)
