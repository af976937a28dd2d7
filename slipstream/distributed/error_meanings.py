"""Classification of errors of torch, a device or a network: out of memory, broken device, lost peer.

Exception types are too general: all CUDA errors are ``AcceleratorError``, NCCL's are ``DistBackendError``, and gloo's
plain ``RuntimeError``. So the message decides. Sources of the texts: ``cudaGetErrorString`` of the CUDA runtime,
torch's ``CUDABlas.cpp``, cuDNN's ``cudnnStatus_t``, NCCL's ``checks.h``, gloo's ``transport/``.
"""

from __future__ import annotations

from enum import Enum

from slipstream.errors import Interrupted


class Meaning(Enum):
    #: Repeating the work on the same devices would fail again.
    MEMORY = "too little memory"
    #: Another attempt may run on another device.
    BROKEN = "a broken device"
    #: Another attempt may succeed with all peers present.
    PEER = "a lost peer"


#: Pairs of a substring of the message and its meaning; the first match counts. An NCCL error that wraps a device's
#: error matches the device's.
MESSAGES: tuple[tuple[str, Meaning], ...] = (
    ("out of memory", Meaning.MEMORY),
    ("Cuda failure 2 ", Meaning.MEMORY),
    ("_STATUS_ALLOC_FAILED", Meaning.MEMORY),
    ("DEVICE_ALLOCATION_FAILED", Meaning.MEMORY),
    ("DefaultCPUAllocator: ", Meaning.MEMORY),
    ("uncorrectable ECC error", Meaning.BROKEN),
    ("uncorrectable NVLink error", Meaning.BROKEN),
    ("GPU is lost", Meaning.BROKEN),
    ("device(s) is/are busy or unavailable", Meaning.BROKEN),
    ("gloo/transport", Meaning.PEER),
    ("gloo/rendezvous", Meaning.PEER),
)


def meaning_of(error: BaseException) -> Meaning | None:
    """Return the meaning of an error; None if the error is unknown and most likely a bug."""
    import torch.distributed as dist

    if isinstance(error, MemoryError):
        return Meaning.MEMORY
    if not isinstance(error, RuntimeError) or isinstance(error, Interrupted):
        return None
    message = str(error)
    known = next((meaning for part, meaning in MESSAGES if part in message), None)
    return known or (Meaning.PEER if isinstance(error, dist.DistError) else None)
