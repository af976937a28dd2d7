"""What a user can do about errors that torch words for its developers."""

from __future__ import annotations

import torch

from slipstream.errors import UserError


def explained(error: BaseException) -> UserError | None:
    """The user error behind ``error``; None if there is no setting that mends it."""
    said = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator: " in said:
        return UserError(f"training.accumulation: out of memory ({said}); raise it, or lower training.batch_size")
    if not isinstance(error, RuntimeError):
        return None
    if "does not have a deterministic implementation" in said:
        what = said.partition(" does not have")[0]
        return UserError(
            f"training.deterministic: {what} has no deterministic kernel on this device; choose another layer, or set "
            "it to false, and runs are no longer the same bit for bit"
        )
    if said.startswith("Expected to have finished reduction in the prior iteration"):
        return UserError(
            "model.name: some of its parameters take part in the loss of some batches only; let them take part in all, "
            "multiplied by 0 where they do not count"
        )
    return None
