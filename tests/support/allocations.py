"""Real CPU memory of a block: by the profiler's allocation events, and by malloc's own count."""

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

#: The profiler's name of an allocation or, with negative bytes, of a release.
EVENT = "[memory]"


def allocated(work: Callable[[], object]) -> list[int]:
    """The bytes that ``work`` has allocated after each of its allocations and releases, counted from 0 at its start.
    Events are those of this thread alone."""
    gc.collect()  # or what others have left would seem to be released by ``work``
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        work()
    events = [event for event in profile.kineto_results.events() if event.name() == EVENT]
    running, total = [0], 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        running.append(total)
    return running


class MallocInfo(ctypes.Structure):
    """Of <malloc.h>."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "cost",
        )
    ]


def in_use() -> int:
    """The bytes that malloc has given to this process, to whichever thread, and not got back."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallocInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


class AfterEachOperation(TorchDispatchMode):
    """Looks at malloc's count after each operation within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, in_use())
        return result


def most_in_use(work: Callable[[], object]) -> int:
    """The most bytes that malloc has given out, to all threads together, after any operation of ``work``."""
    with AfterEachOperation() as looking:
        work()
    return looking.most
