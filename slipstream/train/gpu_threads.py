"""GPU selection for new threads.

The current device of a new thread is GPU 0, whichever GPU its process uses. Creating a stream on GPU 0 would create a
CUDA context there: half a GiB for every rank of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def same_gpu() -> Callable[[], None]:
    """Return a function that selects this thread's GPU in a new thread, which must call it first.

    It does nothing if this process uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
