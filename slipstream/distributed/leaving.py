"""How a process leaves that its peers do not expect to.

To take a process group down means to wait for the peers: NCCL's shutdown does not return while these are in a
collective, which waits for this process, until its watchdog kills them all after ten minutes. So a group is taken down
only where all ranks end together; elsewhere it is left standing, and the process says what happened and ends at once.
The kernel then closes its connections, and whoever started the processes ends the peers.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist


def group_stands() -> bool:
    """Whether this process has a process group, with peers who may wait for it."""
    return dist.is_available() and dist.is_initialized()


def leave() -> NoReturn:
    """End this process with exit code 1 and all that it has said: no destructor, no other thread is waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)
