"""User errors in multi-process jobs: agreement of all ranks, missing devices, and converted torch errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

import torch.distributed as dist

from slipstream.shared.errors import Agreed, Interrupted, UserError

if TYPE_CHECKING:
    pass

#: Error message for parameters that have a gradient in some steps only.
SOMETIMES_UNUSED = (
    "model.name: some of its parameters take part in the loss of some batches only; let them take part in all, "
    "multiplied by 0 where they do not count"
)


class AgreedUserError(Agreed, UserError):
    """User error that any rank found and all ranks raise."""


@contextmanager
def same_error_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block on every rank; if any fails, raise the lowest failed rank's error on all ranks.

    ``UserError``, and errors that :func:`torch_user_error` converts, become ``AgreedUserError``. If only one raised,
    the others would wait in their next collective. Costs one small collective in ``group``, which must be a gloo group
    if GPU memory may be exhausted, since NCCL needs some.
    """
    import torch.distributed as dist

    mine: str | None = None
    try:
        yield
    except Exception as error:
        mistake = error if isinstance(error, UserError) else torch_user_error(error)
        if mistake is None:
            raise
        mine = mistake.message
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, mine, group=group)
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise AgreedUserError(first)


def check_gpus(processes: int, gpus: int) -> None:
    """Raise ``UserError`` if a machine has GPUs, but fewer than ``processes``."""
    if 0 < gpus < processes:
        raise UserError(
            f"{processes} processes for {gpus} GPU{'s' if gpus > 1 else ''}: each process needs one of its own; start "
            f"at most {gpus} on this machine, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )


def resolve_backend(wanted: str, gpus: int) -> str:
    """Return ``nccl`` or ``gloo``, given ``wanted`` or "auto"; raises ``UserError`` for nccl without GPUs."""
    if wanted == "nccl" and not gpus:
        raise UserError("training.backend: nccl needs a GPU for each process, and there is none; expected auto or gloo")
    return ("nccl" if gpus else "gloo") if wanted == "auto" else wanted


def torch_user_error(error: BaseException) -> UserError | None:
    """Convert a torch error to a user error with the setting to change; None if no setting helps."""
    message = str(error)
    if error_meaning(error) is ErrorMeaning.MEMORY:
        return UserError(f"training.accumulation: out of memory ({message}); raise it, or lower training.batch_size")
    if not isinstance(error, RuntimeError):
        return None
    if "does not have a deterministic implementation" in message:
        what = message.partition(" does not have")[0]
        return UserError(
            f"training.deterministic: {what} has no deterministic kernel on this device; choose another layer, or set "
            "it to false, which makes runs differ in their last bits"
        )
    if message.startswith("Expected to have finished reduction in the prior iteration"):
        return UserError(SOMETIMES_UNUSED)
    return None


# Exception types are too general: all CUDA errors are ``AcceleratorError``, NCCL's are ``DistBackendError``, and gloo's
# plain ``RuntimeError``. So the message decides. Sources of the texts: ``cudaGetErrorString`` of the CUDA runtime,
# torch's ``CUDABlas.cpp``, cuDNN's ``cudnnStatus_t``, NCCL's ``checks.h``, gloo's ``transport/``.
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


# If they waited in a collective, NCCL's watchdog would kill them after ten minutes; writing a large model takes longer.
#: Seconds between polls of the store.
POLL_S = 0.2
DONE = "done"


def leave_after_rank_0(
    store: dist.Store, rank: int, world: int, refused: str = "", timeout: timedelta = timedelta(minutes=10)
) -> None:
    """Wait, without a timeout, until rank 0 has called this function, too.

    Rank 0, which may host the store, shuts down last: it waits up to ``timeout`` for all other ranks.

    If rank 0 passes a message ``refused``, all ranks raise ``AgreedUserError`` with it. Raises
    ``torch.distributed.DistError`` if the store, or on rank 0 another rank, is lost.
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
