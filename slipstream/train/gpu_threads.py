"""New threads on the GPU of the thread that starts them.

A thread begins on the first GPU, wherever its process computes. There a stream of its own makes a context: half a GiB
on GPU 0 for every rank of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def same_gpu() -> Callable[[], None]:
    """What a new thread calls first, to be on this thread's GPU; it does nothing where this process uses none."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
