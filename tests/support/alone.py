"""Process groups with a single failing rank, where a shutdown waits for the peers, as with NCCL."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.process_group import process_group
from slipstream.shared.distributed.user_errors import AgreedUserError
from slipstream.shared.errors import AgreedPreempted, Preempted, UserError

#: How long a group takes to be taken down while its peers do not come.
DESTROY_S = 20.0
ALONE: Mapping[str, Callable[[], Exception]] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "bug": lambda: ZeroDivisionError("a bug in the step"),
    "refused": lambda: UserError("data: damaged"),
    "preempted": lambda: Preempted("stopped while waiting for data"),
}
TOGETHER: Mapping[str, Callable[[], Exception]] = {
    "agreed": lambda: AgreedUserError("training.learning_rate: too high"),
    "all preempted": lambda: AgreedPreempted("stopped at step 3, saved"),
}


def wait_for_peers(*_: object) -> None:
    time.sleep(DESTROY_S)


def fail_on_rank_1(kind: str, note: Path) -> None:
    """In a group: rank 1 notes the time and fails, rank 0 waits for it."""
    vars(dist)["destroy_process_group"] = wait_for_peers
    with process_group(timedelta(seconds=DESTROY_S)) as group:
        dist.barrier()
        if group.rank == 0:
            time.sleep(DESTROY_S)
        note.write_text(str(time.time()))
        raise ALONE[kind]()


def worker(directory: str, kind: str) -> object:
    """What the plugin runs in a worker of a pod."""
    from slipstream.flyte.elastic import Workspace

    workspace = Workspace("train", directory, "none", "", Holder())
    return workspace.work(lambda: fail_on_rank_1(kind, Path(f"{directory}.failed")))


def end_together(rank: int, port: int, kind: str, note: str) -> None:
    """Both ranks end alike; each notes that it took its group down."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | address
    destroy = dist.destroy_process_group

    def noted(*groups: dist.ProcessGroup) -> None:
        destroy(*groups)
        Path(f"{note}.{rank}").touch()

    vars(dist)["destroy_process_group"] = noted
    with suppress(AgreedUserError, AgreedPreempted), process_group():
        dist.barrier()  # a rank that has not joined yet would find the other gone
        if kind in TOGETHER:
            raise TOGETHER[kind]()
