"""GPU selection for new threads.

A thread starts on the first GPU, whichever its process uses. There a stream of its own creates a context: half a GiB on
GPU 0 for every rank of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def same_gpu() -> Callable[[], None]:
    """Return a function that moves a new thread to this thread's GPU.

    The new thread calls it first. It does nothing if this process uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
