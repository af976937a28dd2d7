"""Shutdown of a process while its peers still expect it.

Destroying a process group waits for the peers: NCCL's shutdown does not return while they wait for this process in a
collective, until its watchdog kills them all after ten minutes. So a group is destroyed only if all ranks end together.
Otherwise it is kept, and the process reports the cause and ends at once. The kernel then closes its connections, and
the launcher ends the peers.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist


def group_stands() -> bool:
    """Return True if this process has a process group, so that peers may wait for it."""
    return dist.is_available() and dist.is_initialized()


def exit_at_once() -> NoReturn:
    """Flush the output and end this process with exit code 1, without destructors or joining threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)
