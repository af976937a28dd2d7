"""What a failure of the workers means to Flyte: try again, or tell the user.

Recoverable is what another attempt can help: the machine was taken away, a worker was lost to a signal, a peer was
lost, a store stayed away. A user's mistake, a loss that is no number, too little memory and bugs are not: retried they
would only cost the same again.
"""

from __future__ import annotations

import signal

from tasks.errors import Interrupted, UserError
from tasks.storage import StorageUnavailable


def as_seen_by_flyte(error: Exception) -> Exception:
    """The error that a worker raises instead of ``error``: an ``Interrupted`` if another attempt can help, a
    ``UserError`` if a setting can, else the same."""
    import torch
    import torch.distributed as dist

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return UserError(f"training.accumulation: out of memory ({error}); raise it, or lower training.batch_size")
    if isinstance(error, (StorageUnavailable, dist.DistError)) or lost_peer(error):
        return Interrupted(f"{type(error).__name__}: {error}")
    return error


def lost_peer(error: Exception) -> bool:
    """Whether gloo lost a connection; it raises a plain ``RuntimeError`` that names its own source file."""
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def lost_to_signal(exit_code: int) -> str:
    """The name of the signal that ended a worker; empty if it ended otherwise."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else ""
    except ValueError:
        return f"signal {-exit_code}"
