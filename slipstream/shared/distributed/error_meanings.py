"""Classification of errors of torch, a device or a network: out of memory, broken device, lost peer.

Exception types are too general: all CUDA errors are ``AcceleratorError``, NCCL's are ``DistBackendError``, and gloo's
plain ``RuntimeError``. So the message decides. Sources of the texts: ``cudaGetErrorString`` of the CUDA runtime,
torch's ``CUDABlas.cpp``, cuDNN's ``cudnnStatus_t``, NCCL's ``checks.h``, gloo's ``transport/``.
"""

from __future__ import annotations

from enum import Enum

from slipstream.shared.errors import Interrupted


class ErrorMeaning(Enum):
    #: Repeating the work on the same devices would fail again.
    MEMORY = "too little memory"
    #: Another attempt may run on another device.
    BROKEN = "a broken device"
    #: Another attempt may succeed with all peers present.
    PEER = "a lost peer"


#: Pairs of a substring of the message and its meaning; the first match counts. An NCCL error that wraps a device's
#: error matches the device's.
MESSAGES: tuple[tuple[str, ErrorMeaning], ...] = (
    ("out of memory", ErrorMeaning.MEMORY),
    ("Cuda failure 2 ", ErrorMeaning.MEMORY),
    ("_STATUS_ALLOC_FAILED", ErrorMeaning.MEMORY),
    ("DEVICE_ALLOCATION_FAILED", ErrorMeaning.MEMORY),
    ("DefaultCPUAllocator: ", ErrorMeaning.MEMORY),
    ("uncorrectable ECC error", ErrorMeaning.BROKEN),
    ("uncorrectable NVLink error", ErrorMeaning.BROKEN),
    ("GPU is lost", ErrorMeaning.BROKEN),
    ("device(s) is/are busy or unavailable", ErrorMeaning.BROKEN),
    ("gloo/transport", ErrorMeaning.PEER),
    ("gloo/rendezvous", ErrorMeaning.PEER),
)


def error_meaning(error: BaseException) -> ErrorMeaning | None:
    """Return the meaning of an error; None if the error is unknown and most likely a bug."""
    import torch.distributed as dist

    if isinstance(error, MemoryError):
        return ErrorMeaning.MEMORY
    if not isinstance(error, RuntimeError) or isinstance(error, Interrupted):
        return None
    message = str(error)
    known = next((meaning for part, meaning in MESSAGES if part in message), None)
    return known or (ErrorMeaning.PEER if isinstance(error, dist.DistError) else None)
